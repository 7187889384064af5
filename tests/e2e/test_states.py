"""Models with layers that keep a state: exact in every mode, from recorded states where there are any."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.engine_runs import SMALL, submit
from tests.support.families import families
from tests.support.states import STATE_MODELS, ColdRuns, assert_close

from kvgraft.engine import LLM, SamplingParams
from kvgraft.engine.kv.running_states import RunningStates
from kvgraft.engine.model.loading import adopt_model
from kvgraft.engine.snapshot import EngineSnapshot
from kvgraft.errors import CapacityError, ConfigError
from kvgraft.memory import Owner
from kvgraft.prefix import RadixCache, StateRadixCache, register_radix_cache_backend
from kvgraft.testing.tiny_models import VOCABULARY, tiny_model
from kvgraft.types import MissReason

# transformers runs qwen3_next row by row, three times as long; make test has it in tests/reference and in a state machine.
ALL = families(STATE_MODELS, quick=["falcon_h1"])
TWO = families(["qwen3_next", "granitemoehybrid"], quick=["granitemoehybrid"])
GREEDY = SamplingParams(8, ignore_eos=True)


def make_llm(family="granitemoehybrid", **settings):
    settings = SMALL | {"num_slots": 4_000, "max_running": 8} | settings
    return LLM(adopt_model(family, tiny_model(family), None), **settings)


def random_prompt(rng, length):
    return rng.integers(3, VOCABULARY, length)


@torch.inference_mode()
def stock_logits(llm, token_ids):
    with llm.adapter.stock() as model:
        return model(torch.from_numpy(token_ids)[None], use_cache=False).logits[0].float()


def assert_greedy(llm, prompt, answer):
    """Assert that stock transformers answers so: one pass over prompt and answer says each token's successor."""
    due = stock_logits(llm, np.concatenate([prompt, answer]))[len(prompt) - 1 : -1].argmax(-1)
    assert list(answer) == due.tolist()


def ask(llm, prompt, count=8, reuse="exact", **options):
    """The answer to a prompt, which is the model's own; everything holds after each step."""
    parts = []
    for part in llm.stream(prompt, SamplingParams(count, ignore_eos=True), reuse, **options):
        parts.append(part)
        llm.check()
    output = parts[-1].output
    assert len(output.token_ids) == count
    assert_greedy(llm, prompt, output.token_ids)
    assert llm.num_errors == 0
    return output


def count_passes(llm, monkeypatch):
    """Rows of each forward pass of a prompt from now on."""
    own, counts = llm.adapter.forward, []

    def forward(batch):
        counts.extend(len(rows.positions) for rows in batch)
        return own(batch)

    monkeypatch.setattr(llm.adapter, "forward", forward)
    return counts


def states_read(llm):
    """Tokens that each state has read, used or not."""
    return [llm.adapter.states.num_tokens(state) for state in range(llm.adapter.states.num_states)]


def use_up(opened, continuation):
    with opened as probe:
        probe.logits(continuation)


def assert_idle(llm):
    llm.check()
    assert llm.usage().request == llm.space.state_usage().request == 0


@ALL
def test_model_gets_states_and_the_tree_that_records_them(family):
    llm = make_llm(family)
    assert isinstance(llm.space.layers, RunningStates)
    assert isinstance(llm.space.prefix, StateRadixCache)
    assert llm.space.state_usage().free == llm.adapter.states.num_states >= 8
    assert "state" in llm.graft_refusal
    assert llm.space.held_bytes == 0
    assert llm.space.limit_bytes == llm.adapter.pool.num_bytes + llm.adapter.states.num_bytes


@ALL
@pytest.mark.parametrize(
    ("reuse", "max_rows"), [("off", 4096), ("exact", 7), ("exact", 4096), ("graft", 50), ("verified", 50)]
)
def test_conversation_is_the_models_own_and_goes_on_from_its_last_answer(family, reuse, max_rows, rng):
    llm = make_llm(family, max_rows=max_rows)
    history, reused = random_prompt(rng, 90), 0
    for _ in range(3):
        output = ask(llm, history, 12, reuse)
        assert output.report.exact_tokens == (0 if reuse == "off" else reused)
        reused = len(history) + 11
        history = np.concatenate([history, output.token_ids, random_prompt(rng, 10)])
    assert_idle(llm)


@ALL
@pytest.mark.parametrize("max_rows", [10, 4096])
def test_logits_of_all_positions_are_the_models_own(family, max_rows, rng):
    """The first position is a prompt, all others its continuation; then all of them behind a recorded state."""
    llm = make_llm(family, max_rows=max_rows)
    token_ids = random_prompt(rng, 150)
    due = stock_logits(llm, token_ids)
    for prompt_len in (1, 100):
        assert_close(
            llm.score(token_ids[:prompt_len], token_ids[prompt_len:], "exact").logits, due[prompt_len - 1 : -1]
        )
    ask(llm, token_ids[:60])
    score = llm.score(token_ids[:100], token_ids[100:], "exact")
    assert score.report.exact_tokens == 59
    assert_close(score.logits, due[99:-1])
    assert_idle(llm)


@ALL
def test_sequences_side_by_side_are_exact(family, rng):
    llm = make_llm(family, max_rows=40)
    prompts = [random_prompt(rng, length) for length in (5, 60, 140, 23)]
    streams = [llm.stream(prompt, SamplingParams(30, ignore_eos=True), "exact") for prompt in prompts]
    tokens = [[] for _ in prompts]
    for parts in zip(*streams, strict=True):
        for own, part in zip(tokens, parts, strict=True):
            own.append(part.token_id)
        llm.check()
    for prompt, own in zip(prompts, tokens, strict=True):
        assert len(own) == 30
        assert_greedy(llm, prompt, own)
    assert_idle(llm)


@ALL
def test_document_in_front_of_other_questions_is_recorded_where_they_part(family, rng):
    llm = make_llm(family)
    document = random_prompt(rng, 200)
    prompts = [np.concatenate([document, random_prompt(rng, 40)]) for _ in range(4)]
    assert [ask(llm, prompt).report.exact_tokens for prompt in prompts] == [0, 0, 200, 200]
    assert_idle(llm)


@TWO
@pytest.mark.parametrize(("page_size", "found"), [(1, 95), (16, 80), (64, 64)])
def test_prompt_that_is_sent_again_is_found_up_to_its_last_token(family, page_size, found, rng):
    """The last token is always computed, so the state after it would be of no use here, even at the end of a page."""
    llm = make_llm(family, page_size=page_size)
    prompt = random_prompt(rng, 96)
    assert [ask(llm, prompt).report.exact_tokens for _ in range(3)] == [0, found, found]


@TWO
@pytest.mark.parametrize("max_rows", [30, 4096])
def test_states_are_recorded_without_a_pass_of_their_own(family, max_rows, rng, monkeypatch):
    llm = make_llm(family, max_rows=max_rows)
    document = random_prompt(rng, 100)
    passes = count_passes(llm, monkeypatch)
    for _ in range(3):
        ask(llm, np.concatenate([document, random_prompt(rng, 20)]), 1)
    due = [120, 120, 20]
    assert passes == [min(max_rows, left) for length in due for left in range(length, 0, -max_rows)]


@TWO
def test_what_leaves_no_trace_records_no_state(family, rng):
    llm = make_llm(family, page_size=4)
    prompt, answer = random_prompt(rng, 60), random_prompt(rng, 9)
    ask(llm, np.concatenate([prompt[:40], random_prompt(rng, 20)]))
    for use in (
        lambda: llm.score(prompt, answer, "exact"),
        lambda: llm.dictate(prompt, answer, SamplingParams(9, ignore_eos=True), "exact"),
        lambda: use_up(llm.probe(prompt, 9, "exact"), answer),
    ):
        before = states_read(llm)
        use()
        assert sum(one != other for one, other in zip(states_read(llm), before, strict=True)) <= 1
        assert_idle(llm)


@TWO
def test_prompt_whose_answer_is_left_out_goes_on_from_its_end(family, rng):
    """As chat templates do with what a model thought."""
    llm = make_llm(family)
    prompt = random_prompt(rng, 100)
    ask(llm, prompt)
    assert ask(llm, np.concatenate([prompt, random_prompt(rng, 20)])).report.exact_tokens == 99


@TWO
def test_forks_of_one_state_do_not_disturb_each_other(family, rng):
    llm = make_llm(family)
    front = random_prompt(rng, 80)
    ask(llm, front)
    prompts = [np.concatenate([front, random_prompt(rng, 5 + index)]) for index in range(4)]
    streams = [llm.stream(prompt, SamplingParams(20, ignore_eos=True), "exact") for prompt in prompts]
    tokens = [[part.token_id for part in parts] for parts in zip(*streams, strict=True)]
    for index, prompt in enumerate(prompts):
        assert_greedy(llm, prompt, [own[index] for own in tokens])
    cold = ColdRuns(llm.adapter.model, 200)
    namespace = llm.engine.builder.build(front).namespace
    assert cold.assert_prefix_is_exact(llm.adapter, llm.space, namespace, front) == 79


@TWO
@pytest.mark.parametrize("page_size", [16, 64])
def test_states_lie_at_ends_of_pages(family, page_size, rng):
    llm = make_llm(family, page_size=page_size, max_rows=50)
    history = random_prompt(rng, 100)
    first = ask(llm, history, 60)
    history = np.concatenate([history, first.token_ids, random_prompt(rng, 10)])
    whole = (len(history) - 11) // page_size * page_size
    assert ask(llm, history).report.exact_tokens == whole
    assert_idle(llm)


@TWO
def test_salts_keep_states_apart(family, rng):
    llm = make_llm(family)
    prompt = random_prompt(rng, 100)
    ask(llm, prompt, cache_salt="a")
    longer = np.concatenate([prompt, random_prompt(rng, 10)])
    assert ask(llm, longer, cache_salt="b").report.exact_tokens == 0
    assert ask(llm, longer, cache_salt="a").report.exact_tokens == 99


@pytest.mark.parametrize("reuse", ["graft", "verified"])
def test_graft_is_refused_with_the_reason_and_leaves_no_donors(reuse, rng):
    llm = make_llm()
    document = random_prompt(rng, 200)
    ask(llm, document, reuse=reuse)
    report = ask(llm, np.concatenate([random_prompt(rng, 30), document]), reuse=reuse).report
    assert report.miss.reason is MissReason.MODEL_REFUSED
    assert "state" in report.miss.detail
    assert not len(llm.space.donors)


@ALL
def test_preempted_request_goes_on_from_its_own_state(family, rng):
    llm = make_llm(family, max_rows=50)
    engine, prompt = llm.engine, random_prompt(rng, 120)
    active = submit(engine, prompt, 20, "exact")
    tokens = []
    number = 0
    while engine.has_work:
        if number in (1, 8, 15):
            engine.scheduler.preempt(engine.scheduler.running[0])
            llm.check()
        tokens += [event.part.token_id for event in engine.step()]
        llm.check()
        number += 1
    assert len(tokens) == 20
    assert_greedy(llm, prompt, tokens)
    assert active.num_preemptions == 3
    assert_idle(llm)


@TWO
def test_stream_goes_on_when_everything_cached_is_forgotten(family, rng):
    """Its state is its own, and what it leaves is of an epoch that is over."""
    llm = make_llm(family)
    prompt = random_prompt(rng, 100)
    llm.generate(prompt, GREEDY, "exact")
    longer = np.concatenate([prompt, random_prompt(rng, 20)])
    stream = llm.stream(longer, SamplingParams(30, ignore_eos=True), "exact")
    tokens = [next(stream).token_id for _ in range(3)]
    llm.reset()
    llm.check()
    tokens += [part.token_id for part in stream]
    assert len(tokens) == 30
    assert_greedy(llm, longer, tokens)
    assert llm.num_errors == 0
    assert llm.space.state_usage().cached == llm.usage().cached == 0
    assert ask(llm, longer).report.exact_tokens == 0


@TWO
def test_closed_stream_releases_states(family, rng):
    llm = make_llm(family)
    for steps in (1, 10):
        stream = llm.stream(random_prompt(rng, 80), SamplingParams(100, ignore_eos=True))
        for _ in range(steps):
            next(stream)
        stream.close()
        assert_idle(llm)


@TWO
def test_session_goes_on_from_its_last_answer(family, rng):
    llm = make_llm(family)
    session = llm.open_session()
    first = random_prompt(rng, 60)
    output = llm.generate(first, GREEDY, "exact", session_id=session)[0]
    llm.check()
    held = np.concatenate([first, output.token_ids])
    appended = random_prompt(rng, 10)
    output = llm.generate(np.concatenate([held, appended]), GREEDY, "exact", session_id=session)[0]
    assert output.report.exact_tokens == 67
    assert_greedy(llm, np.concatenate([held, appended]), output.token_ids)
    llm.close_session(session)
    assert_idle(llm)


@TWO
def test_few_states_are_shared_and_requests_wait_for_them(family, rng):
    """As many as the plan allows at least: two requests run, the others wait, and answers are what they are."""
    llm = make_llm(family)
    space = llm.space
    hoarded = space.layers.allocator.allocate(space.layers.allocator.num_slots - 4)
    prompts = [random_prompt(rng, length) for length in (30, 61, 90, 45, 70, 50)]
    streams = [llm.stream(prompt, SamplingParams(20, ignore_eos=True), "exact") for prompt in prompts]
    tokens = [[part.token_id for part in stream] for stream in streams]
    for prompt, own in zip(prompts, tokens, strict=True):
        assert_greedy(llm, prompt, own)
    space.layers.allocator.release(hoarded, Owner.REQUEST)
    assert_idle(llm)


@TWO
def test_least_valuable_states_leave_where_there_is_no_room(family, rng):
    llm = make_llm(family)
    hoarded = llm.space.layers.allocator.allocate(llm.space.layers.allocator.num_slots - 5)
    for _ in range(6):
        llm.generate(random_prompt(rng, 60), GREEDY, "exact")
        llm.space.check()
    assert llm.space.state_usage().cached <= 5
    llm.space.layers.allocator.release(hoarded, Owner.REQUEST)
    assert_idle(llm)


def test_probe_of_states_says_when_there_are_none(rng):
    llm = make_llm()
    llm.space.layers.allocator.allocate(llm.space.layers.allocator.num_slots)
    with pytest.raises(CapacityError, match="states"):
        llm.score(random_prompt(rng, 20), [3])
    assert llm.usage().request == 0


@TWO
def test_probability_of_a_prompt_is_computed_from_its_first_token(family, rng):
    llm = make_llm(family, max_rows=64)
    prompt = random_prompt(rng, 100)
    ask(llm, prompt[:50])
    sampling = SamplingParams(4, ignore_eos=True, prompt_logprobs=0)
    output = llm.generate(prompt, sampling, "exact")[0]
    due = stock_logits(llm, prompt).log_softmax(-1)
    found = [entry.logprob for entry in output.prompt_logprobs[1:]]
    expected = due[torch.arange(99), torch.from_numpy(prompt[1:])]
    assert float((torch.tensor(found) - expected).abs().max()) < 1e-4
    assert output.report.exact_tokens == 0
    assert_idle(llm)


@TWO
def test_dictated_answer_and_probe_are_what_would_be_served(family, rng):
    llm = make_llm(family, max_rows=64)
    prompt, answer = random_prompt(rng, 100), random_prompt(rng, 6)
    ask(llm, prompt[:50])
    due = stock_logits(llm, np.concatenate([prompt, answer]))[99:-1]
    dictated = llm.dictate(prompt, answer, SamplingParams(6, ignore_eos=True), "exact")
    assert dictated.report.exact_tokens == 49
    assert_close(dictated.logits, due)
    with llm.probe(prompt, 6, "exact") as probe:
        assert not probe.can_rewind
        assert_close(probe.logits(answer), due)
    assert_idle(llm)


@TWO
def test_pass_that_fails_for_one_request_leaves_the_states_of_others_alone(family, rng, monkeypatch):
    """A failed batch runs again request by request: had the first attempt moved states, tokens would be read twice."""
    llm = make_llm(family)
    engine = llm.engine
    prompts = [random_prompt(rng, length) for length in (40, 60, 50)]
    actives = [submit(engine, prompt, 10, "exact") for prompt in prompts]
    head, calls = llm.adapter.model.get_output_embeddings(), []

    def fails_in_company(module, args):
        calls.append(args[0].shape[1])
        if len(calls) % 3 and args[0].shape[1] > 1:
            raise RuntimeError("the last layer of all")

    tokens = {active.request.request_id: [] for active in actives}
    handle = head.register_forward_pre_hook(fails_in_company)
    while engine.has_work:
        for event in engine.step():
            assert event.error is None
            tokens[event.request_id].append(event.part.token_id)
        llm.check()
    handle.remove()
    assert max(calls) > 1
    for prompt, own in zip(prompts, tokens.values(), strict=True):
        assert len(own) == 10
        assert_greedy(llm, prompt, own)


@TWO
def test_one_prompt_asked_several_times_gets_states_of_its_own(family, rng):
    llm = make_llm(family)
    prompt = random_prompt(rng, 70)
    outputs = llm.generate([prompt] * 4, GREEDY, "exact")
    for output in outputs:
        assert_greedy(llm, prompt, output.token_ids)
    assert outputs[-1].report.exact_tokens == 69
    assert_idle(llm)


def test_snapshot_counts_states_and_their_bytes(rng):
    llm = make_llm()
    llm.generate(random_prompt(rng, 70), GREEDY, "exact")
    snapshot = EngineSnapshot.of(llm.engine, is_alive=True, is_closing=False)
    assert snapshot.window_usage is None
    assert snapshot.state_usage.cached == 2
    used, limit = snapshot.memory.pools["kv"]
    states = llm.adapter.states
    assert used == 2 * states.bytes_per_state + snapshot.usage.cached * llm.adapter.pool.bytes_per_token
    assert limit == states.num_bytes + llm.adapter.pool.num_bytes


def test_prefix_cache_without_states_is_refused():
    register_radix_cache_backend("stateless", lambda context: RadixCache(context.page_size))
    with pytest.raises(ConfigError, match="stateless"):
        make_llm(radix_cache_backend="stateless")


def test_request_without_reuse_records_for_others(rng):
    """It reads nothing that others left, and leaves what others may read."""
    llm = make_llm()
    prompt = random_prompt(rng, 60)
    longer = np.concatenate([prompt, random_prompt(rng, 10)])
    ask(llm, prompt, reuse="off")
    assert ask(llm, longer, reuse="off").report.exact_tokens == 0
    assert ask(llm, np.concatenate([prompt, random_prompt(rng, 10)])).report.exact_tokens == 59


@pytest.mark.parametrize("page_size", [1, 16])
def test_steps_that_their_user_interrupts_are_taken_again(page_size, rng, monkeypatch):
    """Ctrl-C in a program that takes the steps itself, amid prompts and answers: rows are prepared twice and read once."""
    llm = make_llm(page_size=page_size, max_rows=64)
    engine, forward, interrupts = llm.engine, llm.adapter.forward, iter([True, False] * 100)

    def every_other(batch):
        if next(interrupts):
            raise KeyboardInterrupt
        return forward(batch)

    monkeypatch.setattr(llm.adapter, "forward", every_other)
    prompts = [random_prompt(rng, length) for length in (70, 90)]
    names = [submit(engine, prompt, 20, "exact").request.request_id for prompt in prompts]
    outputs = {}
    while engine.has_work:
        try:
            events = engine.step()
        except KeyboardInterrupt:
            engine.check()
            continue
        for event in events:
            assert event.error is None
            if event.part.output is not None:
                outputs[event.request_id] = event.part.output
    monkeypatch.undo()
    for name, prompt in zip(names, prompts, strict=True):
        assert_greedy(llm, prompt, outputs[name].token_ids)
    assert llm.num_errors == 0
    assert_idle(llm)
    continued = np.concatenate([prompts[0], outputs[names[0]].token_ids])
    assert ask(llm, continued).report.exact_tokens >= (89 if page_size == 1 else 80)
