"""The offline API on a tiny random model: exactness, reuse, isolation, conservation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.engine_runs import SMALL

from kvgraft.engine import LLM, FinishReason, SamplingParams
from kvgraft.engine.model.loading import adopt_model
from kvgraft.errors import ConfigError, CorruptCacheError
from kvgraft.memory import Owner
from kvgraft.prefix import RadixCache, register_radix_cache_backend
from kvgraft.testing.tiny_models import VOCABULARY, tiny_model
from kvgraft.types import Fidelity, MissReason

GREEDY = SamplingParams(8, ignore_eos=True)
ANSWER = SamplingParams(24, ignore_eos=True)
"""Longer than `min_run`: a text that others know but for less than that is not registered again."""


def varied(seed):
    """Sampling this hot makes a small random model, which repeats itself, answer with new text."""
    return SamplingParams(24, ignore_eos=True, temperature=100.0, seed=seed)


def make_llm(family="llama", **settings):
    settings = SMALL | {"num_slots": 2_000, "selection": "none"} | settings
    return LLM(adopt_model(family, tiny_model(family), None), **settings)


@pytest.fixture
def document(rng):
    return rng.integers(3, VOCABULARY, 200)


def behind(rng, document, count=50):
    return np.concatenate([rng.integers(3, VOCABULARY, count), document, rng.integers(3, VOCABULARY, 10)])


@torch.inference_mode()
def stock_greedy(llm, prompt, count):
    ids = torch.from_numpy(prompt)[None]
    with llm.adapter.stock() as model:
        for _ in range(count):
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return tuple(ids[0, len(prompt) :].tolist())


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text", "qwen3"])
def test_greedy_output_without_reuse_is_the_models_own(family, rng):
    llm = make_llm(family)
    prompt = rng.integers(3, VOCABULARY, 60)
    assert llm.generate(prompt, GREEDY, "off")[0].token_ids == stock_greedy(llm, prompt, 8)


def test_bf16_model_is_served_with_reuse(rng, document):
    llm = LLM(adopt_model("llama", tiny_model("llama", dtype=torch.bfloat16), None), num_slots=1_000)
    llm.generate(document, GREEDY)
    output = llm.generate(behind(rng, document), GREEDY)[0]
    assert output.report.shifted_tokens + output.report.recomputed_tokens == 200
    assert llm.adapter.pool.dtype == torch.bfloat16


def test_repeated_prompt_is_an_exact_prefix_and_gives_the_same_tokens(rng):
    llm = make_llm()
    prompt = rng.integers(3, VOCABULARY, 100)
    first, second = llm.generate([prompt, prompt], GREEDY, "exact")
    assert (first.report.exact_tokens, second.report.exact_tokens) == (0, 99)
    assert first.token_ids == second.token_ids
    assert second.report.shifted_tokens == 0


def test_document_behind_a_new_beginning_is_reused(rng, document):
    llm = make_llm()
    llm.generate(document, GREEDY)
    output = llm.generate(behind(rng, document), GREEDY)[0]
    (span,) = output.report.spans
    assert (span.target_start, span.length, span.position_delta, span.fidelity) == (50, 200, 50, Fidelity.SHIFTED)
    assert output.report.shifted_tokens == 200
    assert output.report.computed_tokens == 60
    assert output.report.num_tokens == output.report.reused_tokens + output.report.computed_tokens
    llm.check()


def test_recomputing_everything_reused_gives_the_full_prefill(rng, document):
    """The most a policy can do is full prefill, and then nothing of the graft may be left."""
    llm = make_llm(selection="first_k", first_k=200, repair="before")
    llm.generate(document, GREEDY)
    prompt, continuation = behind(rng, document), rng.integers(3, VOCABULARY, 5)
    grafted = llm.score(prompt, continuation, "graft")
    assert grafted.report.recomputed_tokens == 200
    full = llm.score(prompt, continuation, "off")
    torch.testing.assert_close(grafted.logits, full.logits, rtol=0, atol=1e-5 * float(full.logits.abs().max()))


def test_more_recomputation_comes_closer_to_full_prefill(rng, document):
    llm = make_llm(selection="query_seam")
    llm.generate(document, GREEDY)
    prompt, continuation = behind(rng, document), rng.integers(3, VOCABULARY, 5)
    full = llm.score(prompt, continuation, "off").logits
    errors = []
    for ratio in (0.05, 0.5, 0.95):
        other = make_llm(selection="query_seam", recompute_ratio=ratio, repair="before")
        other.generate(document, GREEDY)
        errors.append(float((other.score(prompt, continuation).logits - full).abs().max()))
    assert errors[0] > errors[1] > errors[2]


def test_donor_at_the_same_place_behind_the_same_text_is_bit_equal_to_exact_reuse(rng):
    """Forced gaps inside an exact donor: K/V at delta 0 in the same context lose nothing."""
    llm = make_llm()
    prompt = rng.integers(3, VOCABULARY, 300)
    llm.generate(prompt, GREEDY, "off")
    full = llm.score(prompt, prompt[:5], "off").logits
    exact = llm.score(prompt, prompt[:5], "exact").logits
    torch.testing.assert_close(exact, full, rtol=0, atol=1e-5 * float(full.abs().max()))


def test_two_donors_serve_one_prompt(rng):
    llm = make_llm()
    first, second = (rng.integers(3, VOCABULARY, 80) for _ in range(2))
    llm.generate([first, second], GREEDY)
    prompt = np.concatenate([rng.integers(3, VOCABULARY, 20), second, rng.integers(3, VOCABULARY, 20), first])
    report = llm.generate(prompt, GREEDY)[0].report
    assert report.num_donors == 2
    assert report.shifted_tokens == 159


def test_grafted_spans_do_not_become_exact_prefixes(rng, document):
    llm = make_llm()
    llm.generate(document, GREEDY)
    prompt = behind(rng, document)
    llm.generate(prompt, GREEDY, "graft")
    again = llm.generate(prompt, GREEDY, "exact")[0]
    assert again.report.exact_tokens == 50
    assert again.token_ids == stock_greedy(llm, prompt, 8)


def test_grafted_spans_do_not_become_donors_and_generations_grow(rng, document):
    llm = make_llm(max_generation=1)
    llm.generate(document, ANSWER)
    fresh = rng.integers(3, VOCABULARY, 60)
    llm.generate(np.concatenate([fresh[:40], document, fresh]), ANSWER)
    donors = sorted((len(d.token_ids), d.generation, d.start_position) for d in llm.space.donors)
    assert donors == [(40, 0, 0), (83, 1, 240), (223, 0, 0)]
    # Text computed behind a donor of generation 1 would be generation 2, which the policy does not admit.
    llm.generate(np.concatenate([rng.integers(3, VOCABULARY, 20), fresh[:50], rng.integers(3, VOCABULARY, 60)]), GREEDY)
    assert max(d.generation for d in llm.space.donors) == 1


def test_longer_sequence_replaces_the_donor_it_begins_with(rng):
    llm = make_llm()
    turn = rng.integers(3, VOCABULARY, 100)
    first = llm.generate(turn, varied(1))[0]
    assert [len(d.token_ids) for d in llm.space.donors] == [123]
    llm.generate(np.concatenate([turn, first.token_ids, rng.integers(3, VOCABULARY, 50)]), varied(2))
    assert [len(d.token_ids) for d in llm.space.donors] == [197]
    llm.check()


def test_salts_share_nothing(rng, document):
    llm = make_llm()
    llm.generate(document, GREEDY, cache_salt="a")
    other = llm.generate(behind(rng, document), GREEDY, cache_salt="b")[0]
    same = llm.generate(document, GREEDY, "exact", cache_salt="b")[0]
    assert other.report.reused_tokens == 0
    assert other.report.miss.reason is MissReason.NO_MATCH
    assert same.report.exact_tokens == 0


def test_refused_rope_serves_exact_prefixes_and_says_why(rng, document):
    llm = make_llm("gpt2")
    llm.generate(document, GREEDY)
    shifted = llm.generate(behind(rng, document), GREEDY)[0]
    repeated = llm.generate(document, GREEDY)[0]
    assert shifted.report.miss.reason is MissReason.MODEL_REFUSED
    assert repeated.report.exact_tokens == 199


def test_small_pool_spills_donors_to_the_host_and_grafts_from_there(rng, document):
    llm = make_llm(num_slots=600)
    llm.generate(document, GREEDY)
    for _ in range(4):
        llm.generate(rng.integers(3, VOCABULARY, 400), GREEDY)
        llm.check()
    assert llm.space.num_spilled > 0
    roomy = make_llm()
    roomy.generate(document, GREEDY)
    prompt = behind(rng, document)
    from_host, from_slots = llm.generate(prompt, GREEDY)[0], roomy.generate(prompt, GREEDY)[0]
    assert from_host.report.shifted_tokens == 200
    assert from_host.token_ids == from_slots.token_ids


@pytest.mark.parametrize("selection", [np.empty(0), np.ones(2), 3])
def test_a_selection_of_another_type_is_refused_in_one_line(selection, document):
    with pytest.raises(ConfigError, match="selection is the name of a policy, a SelectionPolicy or None"):
        make_llm().generate(document, GREEDY, selection=selection)


def test_without_host_memory_donors_are_dropped(rng):
    llm = make_llm(num_slots=600, host_bytes=0)
    for _ in range(5):
        llm.generate(rng.integers(3, VOCABULARY, 400), GREEDY)
        llm.check()
    assert llm.space.num_dropped > 0
    assert len(llm.space.host) == 0


def test_prompt_that_does_not_fit_beside_its_donors_is_computed(rng):
    llm = make_llm(num_slots=300)
    document = rng.integers(3, VOCABULARY, 120)
    llm.generate(document, GREEDY)
    prompt = np.concatenate([rng.integers(3, VOCABULARY, 150), document])
    output = llm.generate(prompt, GREEDY)[0]
    assert output.report.miss.reason is MissReason.NO_ROOM
    assert output.token_ids == stock_greedy(llm, prompt, 8)
    llm.check()


def test_closed_stream_releases_its_slots(rng):
    llm = make_llm()
    stream = llm.stream(rng.integers(3, VOCABULARY, 100), SamplingParams(50, ignore_eos=True))
    next(stream)
    assert llm.usage().request == 100 + 32  # the prompt and room for the first tokens
    stream.close()
    usage = llm.usage()
    assert usage.request == 0
    assert usage.free == usage.total - 100  # the prompt was computed and stays for others


def test_slots_that_no_request_gives_back_are_noticed():
    llm = make_llm()
    llm.space.allocator.allocate(3)
    with pytest.raises(CorruptCacheError, match="hold 0 slots, of which the allocator counts 3"):
        llm.check()


def test_streams_that_are_open_together_run_side_by_side(rng):
    llm = make_llm()
    prompts = [rng.integers(3, VOCABULARY, n) for n in (30, 45)]
    streams = [llm.stream(prompt, GREEDY) for prompt in prompts]
    parts = list(zip(*streams, strict=True))
    for prompt, own in zip(prompts, zip(*parts, strict=True), strict=True):
        assert own[-1].output.token_ids == tuple(part.token_id for part in own) == stock_greedy(llm, prompt, 8)


def test_stream_parts_add_up_to_the_output(rng):
    llm = make_llm()
    prompt = rng.integers(3, VOCABULARY, 30)
    parts = list(llm.stream(prompt, GREEDY))
    assert tuple(part.token_id for part in parts) == parts[-1].output.token_ids
    assert [part.output is None for part in parts] == [True] * 7 + [False]
    assert parts[-1].output.finish_reason is FinishReason.LENGTH


def test_failure_while_grafting_is_a_counted_miss(rng, document, monkeypatch, caplog):
    llm = make_llm()
    llm.generate(document, GREEDY)

    def broken(donor, match):
        raise RuntimeError("disk on fire")

    monkeypatch.setattr(llm.space, "source", broken)
    prompt = behind(rng, document)
    output = llm.generate(prompt, GREEDY)[0]
    assert output.token_ids == stock_greedy(llm, prompt, 8)
    assert output.report.miss.reason is MissReason.ERROR
    assert "disk on fire" in output.report.miss.detail
    assert llm.num_errors == 1
    assert "disk on fire" in caplog.text
    llm.check()


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_failure_to_store_a_preempted_request_is_a_counted_miss(family, rng, monkeypatch, caplog):
    """Nobody waits for the answer of `suspend`; a failure there would end the engine's thread."""
    llm = make_llm(family, num_slots=150)
    prompts = [rng.integers(3, VOCABULARY, 40) for _ in range(4)]
    manager, suspended = llm.engine.manager, []
    suspend = manager.suspend

    def broken(*_, **__):
        raise RuntimeError("no room in the tree")

    def suspend_in_vain(cache, token_ids):
        suspended.append(cache)
        with monkeypatch.context() as patch:
            patch.setattr(llm.space.prefix, "insert", broken)
            suspend(cache, token_ids)

    monkeypatch.setattr(manager, "suspend", suspend_in_vain)
    streams = [llm.stream(prompt, SamplingParams(40, ignore_eos=True), "exact") for prompt in prompts]
    tokens = [[] for _ in prompts]
    for parts in zip(*streams, strict=True):
        for own, part in zip(tokens, parts, strict=True):
            own.append(part.token_id)
    assert llm.num_errors == len(suspended) > 0
    assert "no room in the tree" in caplog.text
    assert [tuple(own) for own in tokens] == [stock_greedy(llm, prompt, 40) for prompt in prompts]
    llm.check()


def test_score_leaves_the_cache_as_it_was(rng, document):
    llm = make_llm()
    llm.generate(document, GREEDY)
    before = llm.usage(), len(llm.space.donors)
    llm.score(behind(rng, document), document[:4])
    assert (llm.usage(), len(llm.space.donors)) == before


def test_reset_gives_every_slot_back(rng, document):
    llm = make_llm(num_slots=600)
    for _ in range(3):
        llm.generate(behind(rng, document), GREEDY)
    llm.reset()
    assert llm.usage().free == 600
    assert llm.space.allocator.num_held(Owner.DONOR) == 0
    assert llm.space.host.used_bytes == 0
    llm.check()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "no prompt"),
        (np.empty(0, np.int64), "empty"),
        ([VOCABULARY], "token ids must lie"),
        ([-1], "token ids must lie"),
        ([5] * 3_000, "shorten"),
    ],
)
def test_bad_prompt_is_refused_and_nothing_is_held(prompt, message):
    llm = make_llm()
    with pytest.raises(ConfigError, match=message):
        llm.generate(prompt)
    assert llm.usage().free == 2_000


def test_long_prefill_in_pieces_gives_the_same_tokens(rng, document):
    whole, pieces = make_llm(selection="query_seam"), make_llm(selection="query_seam", max_rows=16)
    prompt = behind(rng, document)
    for llm in (whole, pieces):
        llm.generate(document, GREEDY)
    assert whole.generate(prompt, GREEDY)[0].token_ids == pieces.generate(prompt, GREEDY)[0].token_ids


def test_prefix_cache_of_another_package_serves_the_engine(rng):
    made = []

    class Theirs(RadixCache):
        def __init__(self, page_size):
            super().__init__(page_size)
            made.append(self)

    register_radix_cache_backend("theirs", lambda context: Theirs(context.page_size))
    llm = make_llm(radix_cache_backend="theirs")
    prompt = rng.integers(3, VOCABULARY, 100)
    _, second = llm.generate([prompt, prompt], GREEDY, "exact")
    assert second.report.exact_tokens == 99
    assert llm.space.prefix is made[0]
    llm.check()


def test_engine_without_a_prefix_cache_leaks_nothing(rng):
    register_radix_cache_backend("none", lambda context: RadixCache(context.page_size, disabled=True))
    llm = make_llm(radix_cache_backend="none", num_slots=400)
    prompt = rng.integers(3, VOCABULARY, 100)
    _, second = llm.generate([prompt, prompt], GREEDY, "exact")
    assert second.report.exact_tokens == 0
    llm.check()
    assert llm.usage().cached == llm.usage().request == 0


def test_unknown_prefix_cache_is_one_line():
    with pytest.raises(ConfigError, match="no-such-cache"):
        make_llm(radix_cache_backend="no-such-cache")
