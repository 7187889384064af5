"""Repair after the first token: tokens are those promised, on any schedule, and nothing counts as exact too early."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from tests.engine_runs import SMALL
from tests.support.families import families
from tests.support.kept_kv import assert_donors_are_exact, assert_prefix_is_exact, own_kv

from kvgraft.config import EngineConfig
from kvgraft.engine import LLM, SamplingParams
from kvgraft.engine.core import Engine
from kvgraft.engine.model.loading import adopt_model
from kvgraft.engine.requests.options import RequestOptions
from kvgraft.engine.schedule.active import Phase
from kvgraft.engine.schedule.pace import Pace
from kvgraft.errors import ConfigError
from kvgraft.graft.select import Adaptive, KVDeviation, QuerySeam, RandomShare
from kvgraft.memory import HybridSlotPool
from kvgraft.observability import NullRecorder
from kvgraft.testing.tiny_models import VOCABULARY, tiny_model
from kvgraft.types import RepairTime

QUICK = ("llama", "gemma2")
FAMILIES = families([*QUICK, "mistral", "gpt_neox"], quick=QUICK)
ROWS = [("llama", 3), *((family, rows) for family in QUICK for rows in (16, 500))]
SLOW_ROWS = [("gemma2", 3), *((family, rows) for family in ("mistral", "gpt_neox") for rows in (16, 500))]
GREEDY = SamplingParams(10, ignore_eos=True)
TOLERANCE = 1e-4


UNSURE = {"repair_below_margin": 0}
"""Tiny models are sure of no token: where that is not the subject, their first tokens do not wait."""


def make_llm(family="llama", **settings):
    return LLM(adopt_model(family, tiny_model(family), None), **SMALL | {"num_slots": 2_500, **UNSURE} | settings)


def words(rng, length):
    return rng.integers(3, VOCABULARY, length)


@pytest.fixture
def document(rng):
    return words(rng, 160)


@pytest.fixture
def prompt(rng, document):
    """The query is all that is live after the last span."""
    return np.concatenate([words(rng, 30), document, words(rng, 40)])


def scores(llm, prompt, continuation, times=("before", "after"), **options):
    return [llm.score(prompt, continuation, repair=time, **options).logits for time in times]


@FAMILIES
@pytest.mark.parametrize("policy", [QuerySeam(0.2), RandomShare(0.2), KVDeviation(0.2), Adaptive(0.05, 1e-9, 0.2)])
def test_first_token_is_that_of_none_and_later_ones_are_those_of_a_repair_before_it(
    family, policy, rng, document, prompt
):
    llm = make_llm(family)
    llm.generate(document, SamplingParams(1))
    continuation = words(rng, 5)
    none = llm.score(prompt, continuation, selection="none").logits
    before, after = scores(llm, prompt, continuation, selection=policy)
    assert torch.allclose(after[0], none[0], atol=TOLERANCE)
    assert torch.allclose(after[1:], before[1:], atol=TOLERANCE)
    assert not torch.equal(after[1:], none[1:]), "the repair must change something to be seen here"


@FAMILIES
@pytest.mark.parametrize("max_rows", [10_000, 23])
@pytest.mark.parametrize("policy", ["query_seam", Adaptive(0.05, 1e-9, 0.2)], ids=str)
def test_served_tokens_are_drawn_from_the_logits_that_score_gives(family, max_rows, policy, document, prompt):
    """The row of the first token rides with the last rows of the repair, or comes after it, and sees all of it."""
    llm = make_llm(family, max_rows=max_rows, recompute_ratio=0.2)
    llm.generate(document, SamplingParams(1))
    sampling = SamplingParams(6, ignore_eos=True, logprobs=1)
    parts = list(llm.stream(prompt, sampling, selection=policy))
    tokens = [part.token_id for part in parts]
    llm.reset()
    llm.generate(document, SamplingParams(1))
    expected = llm.score(prompt, tokens, selection=policy).logits.log_softmax(-1)
    for part, row in zip(parts, expected, strict=True):
        assert part.logprobs.logprob == pytest.approx(float(row[part.token_id]), abs=1e-3)
    repair = parts[-1].output.report.repair
    assert (repair.time, repair.from_token, repair.reason) == (RepairTime.AFTER, 2, "")


def make_engine(family="llama", **settings):
    config = EngineConfig(**{"num_slots": 4_000, "recompute_ratio": 0.2, **UNSURE} | settings)
    return Engine(adopt_model(family, tiny_model(family), None), config)


def run_all(engine, prompts, preempt_at=None, **options):
    """Answers in order; with `preempt_at`, each request is preempted once when it is in that phase."""
    requests = [engine.builder.build(prompt, RequestOptions(GREEDY, **options)) for prompt in prompts]
    for request in requests:
        engine.add(request)
    outputs, preempted = {}, set()
    while engine.has_work:
        for event in engine.step():
            assert event.error is None, event.error
            if event.part.output is not None:
                outputs[event.request_id] = event.part.output
        engine.check()
        for active in list(engine.scheduler.running):
            name = active.request.request_id
            if preempt_at is not None and active.phase is preempt_at and name not in preempted:
                preempted.add(name)
                engine.scheduler.preempt(active)
    assert preempt_at is None or len(preempted) >= len(requests) - 1  # the first may be through its phase in one step
    return [outputs[request.request_id] for request in requests]


def learn(engine, texts):
    for text in texts:
        engine.add(engine.builder.build(text, RequestOptions(SamplingParams(1))))
        while engine.has_work:
            engine.step()


@cache
def answered_alone(family):
    """Four texts, prompts of two of them each, and the answer to each prompt by an engine of its own."""
    rng = np.random.default_rng(9)
    texts = [words(rng, 120) for _ in range(4)]
    prompts = [np.concatenate([words(rng, 9), texts[i], texts[i - 1], words(rng, 21)]) for i in range(4)]
    answers = []
    for prompt in prompts:
        engine = make_engine(family)
        learn(engine, texts)
        answers += run_all(engine, [prompt])
    return texts, prompts, answers


@families(["llama", "gemma2"], quick=["llama"])
@pytest.mark.parametrize("how", ["together", "in small pieces", Phase.PREFILL, Phase.REPAIR])
def test_tokens_do_not_depend_on_load(family, how):
    """One request alone, or four at once in pieces of any size, or preempted before its repair is done: the same tokens."""
    texts, prompts, expected = answered_alone(family)
    settings = {"max_rows": 31} if how != "together" else {}
    engine = make_engine(family, **settings)
    learn(engine, texts)
    found = run_all(engine, prompts, how if isinstance(how, Phase) else None)
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    for output, alone in zip(found, expected, strict=True):
        assert output.report.repair == alone.report.repair
        assert output.report.recomputed_runs == alone.report.recomputed_runs


def test_one_token_waits_for_the_repair_and_the_report_says_so(document, prompt):
    llm = make_llm(selection="query_seam")
    llm.generate(document, SamplingParams(1))
    report = llm.generate(prompt, SamplingParams(1))[0].report
    assert (report.repair.time, report.repair.from_token) == (RepairTime.BEFORE, 1)
    assert report.repair.reason == "one token was asked for"
    llm.reset()
    llm.generate(document, SamplingParams(1))
    asked = llm.generate(prompt, SamplingParams(2), repair="before")[0].report.repair
    assert (asked.time, asked.from_token, asked.reason) == (RepairTime.BEFORE, 1, "")


def test_an_answer_that_ends_at_its_first_token_is_not_repaired_and_leaves_approximate_donors(document, prompt):
    llm = make_llm(heal="off")
    llm.generate(document, SamplingParams(1))
    first = llm.generate(prompt, GREEDY, selection="none")[0].token_ids[0]
    llm.reset()
    llm.generate(document, SamplingParams(1))
    output = llm.generate(prompt, SamplingParams(10, stop_token_ids=(int(first),)))[0]
    assert len(output.token_ids) == 1
    assert (output.report.repair.time, output.report.repair.from_token) == (RepairTime.AFTER, None)
    assert (output.report.shifted_tokens, output.report.recomputed_tokens) == (160, 0)
    llm.check()
    assert llm.usage().request == 0
    assert_donors_are_exact(llm.adapter, llm.space, [document, prompt])
    assert assert_prefix_is_exact(llm.adapter, llm.space, llm.engine.builder.build(prompt).namespace, prompt) <= 30
    again = llm.generate(prompt, SamplingParams(10))[0].report
    assert again.recomputed_tokens > 0  # nothing went on from what was not repaired


def test_nothing_is_given_to_others_before_the_repair_is_done(document, prompt):
    """A donor made between the two tokens would hold, or lose, what the repair writes."""
    engine = make_engine(max_rows=16)
    learn(engine, [document])
    known = {donor.donor_id for donor in engine.space.donors}
    engine.add(engine.builder.build(prompt, RequestOptions(GREEDY)))
    seen = set()
    while engine.has_work:
        engine.step()
        for active in engine.scheduler.running:
            seen.add(active.phase)
            if active.phase in (Phase.PREFILL, Phase.REPAIR):
                assert {donor.donor_id for donor in engine.space.donors} == known
    assert Phase.REPAIR in seen


@pytest.mark.parametrize("margin", [1.0, 0.0])
def test_an_unsure_first_token_waits(margin, document, prompt):
    llm = make_llm(repair_below_margin=margin, recompute_ratio=0.3)
    llm.generate(document, SamplingParams(1))
    output = llm.generate(prompt, SamplingParams(4, ignore_eos=True))[0]
    before, after = (make_llm(repair=time, recompute_ratio=0.3) for time in ("before", "after"))
    expected = before if margin else after
    expected.generate(document, SamplingParams(1))
    assert output.token_ids == expected.generate(prompt, SamplingParams(4, ignore_eos=True))[0].token_ids
    repair = output.report.repair
    if margin:
        assert (repair.time, repair.from_token) == (RepairTime.BEFORE, 1)
        assert repair.reason.startswith("the first token was likelier than the next one by ")
    else:
        assert (repair.time, repair.from_token) == (RepairTime.AFTER, 2)


@pytest.mark.parametrize(
    ("family", "rows"), [*ROWS, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW_ROWS)]
)
@pytest.mark.parametrize("selection", ["query_seam", "none"])
def test_decode_steps_heal_until_all_is_exact_and_give_it_to_others(family, rows, selection, document, prompt):
    engine = make_engine(family, repair_rows=rows, selection=selection, heal="off")
    learn(engine, [document])
    sampling = SamplingParams(4 + 230 // (rows - 1), ignore_eos=True)
    active = engine.builder.build(prompt, RequestOptions(sampling))
    engine.add(active)
    output = None
    while engine.has_work:
        for event in engine.step():
            output = event.part.output
        engine.check()
    repair = output.report.repair
    assert repair.rows_per_step == rows
    assert repair.exact_from_token is not None
    assert repair.exact_from_token <= len(output.token_ids)
    assert output.report.shifted_tokens > 0, "the first token was drawn from the graft, and the report stays"
    text = np.concatenate([prompt, output.token_ids[:-1]]).astype(np.int64)
    assert assert_prefix_is_exact(engine.adapter, engine.space, active.namespace, text) == len(text)
    assert assert_donors_are_exact(engine.adapter, engine.space, [document, text]) >= 2
    assert all(donor.generation == 0 for donor in engine.space.donors)
    with engine.adapter.stock() as model, torch.inference_mode():
        logits = model(torch.from_numpy(text)[None], use_cache=False).logits[0]
    exact = logits[len(prompt) - 2 + repair.exact_from_token :].argmax(-1).tolist()
    assert list(output.token_ids[repair.exact_from_token - 1 :]) == exact


class Steps(NullRecorder):
    def __init__(self):
        self.seen = []

    def record_step(self, record):
        self.seen.append(record)


@families(["llama", "gemma2"], quick=["llama"])
@pytest.mark.parametrize("is_preempted", [False, True])
def test_rows_that_decode_steps_heal_are_counted(family, is_preempted, monkeypatch, document, prompt):
    """In the steps and in the report: what was run is what is counted."""
    engine = make_engine(family, repair_rows=16, selection="none", heal="off")
    learn(engine, [document])
    engine._recording._recorder = steps = Steps()
    forward, healed, ran = engine.adapter.forward, [], []

    def watched(batch):
        ran.append(sum(len(rows.positions) for rows in batch))
        healed.extend(position for rows in batch if rows.num_logits == 1 for position in rows.positions[:-1])
        return forward(batch)

    engine.add(engine.builder.build(prompt, RequestOptions(SamplingParams(24, ignore_eos=True))))
    (active,) = engine._active.values()
    answered, output = None, None
    while engine.has_work:
        if answered is None and active.output_ids:
            answered = active.report
            monkeypatch.setattr(engine.adapter, "forward", watched)
            steps.seen.clear()
        for event in engine.step():
            output = event.part.output
        if is_preempted and len(active.output_ids) == 5 and not active.num_preemptions:
            engine.scheduler.preempt(active)
            break
    report = active.report if is_preempted else output.report
    assert len(healed) > 50
    assert report.repair.healed_tokens == len(healed) == sum(step.repair_rows for step in steps.seen)
    assert sum(step.prefill_rows + step.decode_rows + step.repair_rows for step in steps.seen) == sum(ran)
    more = engine.manager.flops.of_positions(np.asarray(healed))
    assert report.computed_flops == pytest.approx(answered.computed_flops + more)
    assert report.shifted_tokens == answered.shifted_tokens == 160, "the first token was drawn from the graft"


@families(["llama", "gemma2"], quick=["llama"])
@pytest.mark.parametrize("how", ["preempted", "cancelled", "ended"])
def test_healing_that_is_cut_off_gives_others_the_exact_part_only(family, how, document, prompt):
    engine = make_engine(family, repair_rows=8, heal="off")
    learn(engine, [document])
    request = engine.builder.build(prompt, RequestOptions(SamplingParams(6 if how == "ended" else 40, ignore_eos=True)))
    engine.add(request)
    (active,) = engine._active.values()
    outputs = []
    while engine.has_work:
        outputs += [event.part.output for event in engine.step() if event.part.output]
        if len(active.output_ids) == 5 and how != "ended" and not active.num_preemptions:
            if how == "cancelled":
                engine.cancel(request.request_id)
            else:
                engine.scheduler.preempt(active)
        engine.check()
    text = np.concatenate([prompt, active.output_ids[:-1]]).astype(np.int64)
    length = assert_prefix_is_exact(engine.adapter, engine.space, request.namespace, text)
    assert length == len(text) if how == "preempted" else length < len(text)
    assert_donors_are_exact(engine.adapter, engine.space, [document, text])
    if how == "preempted":
        assert outputs[0].report.repair.exact_from_token == 6


def test_known_prompts_at_once_add_no_more_to_a_step_than_the_pace_allows(monkeypatch, rng):
    """Gaps and repairs of all of them together, as if they were prefill: they are."""
    engine = make_engine(num_slots=9_000, heal="off")
    documents = [words(rng, 160) for _ in range(3)]
    learn(engine, documents)
    engine._recording._recorder = steps = Steps()
    limit = 100
    allowed = engine.manager.flops.of_range(0, limit)
    monkeypatch.setattr(Pace, "prefill_flops", lambda *_: allowed)
    stream = engine.builder.build(words(rng, 20), RequestOptions(SamplingParams(400, ignore_eos=True), reuse="off"))
    engine.add(stream)
    engine.step()
    prompts = [np.concatenate([words(rng, 30), documents[number % 3], words(rng, 40)]) for number in range(24)]
    requests = [engine.builder.build(prompt, RequestOptions(GREEDY)) for prompt in prompts]
    for request in requests:
        engine.add(request)
    reports = []
    while len(reports) < len(requests):
        reports += [event.part.output.report for event in engine.step() if event.part.output]
        engine.check()
    assert all(report.repair.from_token == 2 and report.recomputed_tokens for report in reports)
    rows = [step.prefill_rows for step in steps.seen]
    assert max(rows) <= limit + 64, "a piece that goes together may be begun with what is left"
    assert sum(rows) > 10 * limit


def test_slots_of_windows_stay_while_healing_needs_them_and_leave_afterwards(rng):
    engine = make_engine("gemma2", repair_rows=8, max_model_len=0)
    assert isinstance(engine.adapter.pool, HybridSlotPool)
    document = words(rng, 160)
    learn(engine, [document])
    prompt = np.concatenate([words(rng, 30), document, words(rng, 40)])
    engine.add(engine.builder.build(prompt, RequestOptions(SamplingParams(60, ignore_eos=True))))
    held = []
    while engine.has_work:
        engine.step()
        held += [active.kv.windows.stop - active.kv.windows.start for active in engine.scheduler.running if active.kv]
    assert max(held) > 200
    assert held[-1] < 100
    assert engine.space.window_usage().request == 0


def test_a_turn_of_a_session_and_a_request_say_their_own_time(document, prompt):
    llm = make_llm()
    llm.generate(document, SamplingParams(1))
    with pytest.raises(ConfigError, match="repair is before or after, not 'now'"):
        llm.generate(prompt, GREEDY, repair="now")
    with pytest.raises(ConfigError, match="repair"):
        make_llm(repair="later")


def test_repaired_kv_are_those_of_a_repair_before_the_first_token(document, prompt):
    """Value for value in every slot of the prompt, for the policy of the default."""
    found = []
    for time in ("before", "after"):
        engine = make_engine(repair=time, heal="off")
        learn(engine, [document])
        engine.add(engine.builder.build(prompt, RequestOptions(SamplingParams(12, ignore_eos=True))))
        (active,) = engine._active.values()
        while len(active.output_ids) != 4:
            engine.step()
        place = engine.adapter.pool.place(active.kv.kv_indices[: len(prompt)])
        found.append([tuple(x.clone() for x in place.read(layer)) for layer in range(engine.adapter.num_layers)])
    exact = own_kv(engine.adapter, prompt)
    for before, after, full in zip(*found, exact, strict=True):
        for one, two, other in zip(before, after, full, strict=True):
            assert torch.allclose(one, two, atol=TOLERANCE)
            assert one.shape == other.shape
