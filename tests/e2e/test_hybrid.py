"""Models with sliding windows on window slots of their own: exact in every mode, and lighter while they decode."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.engine_runs import GEMMA3, SMALL
from tests.support.families import families

from kvgraft.engine import LLM, SamplingParams
from kvgraft.engine.kv.layer_slots import LayerSlots
from kvgraft.engine.kv.sliding_windows import SlidingWindows
from kvgraft.engine.model import slot_plan
from kvgraft.engine.model.loading import adopt_model
from kvgraft.errors import CapacityError, ConfigError
from kvgraft.prefix import RadixCache, SWARadixCache, register_radix_cache_backend
from kvgraft.testing.tiny_models import VOCABULARY, tiny_model
from kvgraft.types import MissReason
from kvgraft.windows import ChunkedWindow, SlidingWindow

WINDOW = 24
GREEDY = SamplingParams(8, ignore_eos=True)
HYBRIDS = {
    "gemma3_text": GEMMA3,
    "gemma2": {},
    "cohere2": {},
    "mistral": {},
    "gpt_oss": {},
    "llama4_text": {},
}
"""5:1, 1:1, 3:1 with layers that have no RoPE, windows only, sinks, chunks with layers that have no RoPE."""
KINDS = families(["gemma3_text", "gpt_oss", "llama4_text"], quick=["gemma3_text"])
ALL_KINDS = families(HYBRIDS, quick=["gemma3_text", "gpt_oss"])


def make_llm(family="gemma3_text", layers=None, **settings):
    settings = SMALL | {"num_slots": 2_000, "selection": "none"} | settings
    return LLM(adopt_model(family, tiny_model(family, **(layers or HYBRIDS.get(family, {}))), None), **settings)


@pytest.fixture
def few_windows(monkeypatch):
    """As few window slots as one request gets on with."""
    monkeypatch.setattr(slot_plan, "_MAX_WINDOW_SHARE", 0.01)


def assert_greedy(llm, prompt, answer, count):
    """Assert that stock transformers answers so: one pass over prompt and answer says each token's successor."""
    assert len(answer) == count
    due = stock_logits(llm, np.concatenate([prompt, answer]))[len(prompt) - 1 : -1].argmax(-1)
    assert list(answer) == due.tolist()


@torch.inference_mode()
def stock_logits(llm, token_ids):
    with llm.adapter.stock() as model:
        return model(torch.from_numpy(token_ids)[None], use_cache=False).logits[0].float()


def assert_close(actual, expected):
    assert float((actual - expected).abs().max()) < 1e-5 * float(expected.abs().max())


def random_prompt(rng, length):
    return rng.integers(3, VOCABULARY, length)


@pytest.mark.parametrize("family", HYBRIDS)
def test_hybrid_model_gets_window_slots_and_the_hybrid_tree(family):
    llm = make_llm(family)
    assert isinstance(llm.space.layers, SlidingWindows)
    assert isinstance(llm.space.prefix, SWARadixCache)
    assert llm.space.prefix.window == (ChunkedWindow if family == "llama4_text" else SlidingWindow)(WINDOW)
    assert llm.adapter.pool.num_window_slots < llm.adapter.pool.num_slots
    is_all_swa = family == "mistral"
    assert (llm.adapter.pool.full is None) is is_all_swa


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_model_without_windows_keeps_one_space(family):
    llm = make_llm(family)
    assert type(llm.space.layers) is LayerSlots
    assert type(llm.space.prefix) is RadixCache


def test_windows_as_long_as_the_pool_keep_one_space():
    assert type(make_llm(num_slots=100).space.layers) is LayerSlots


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("max_rows", [7, 4096])
def test_greedy_output_is_the_models_own(family, max_rows, rng):
    llm = make_llm(family, max_rows=max_rows)
    prompt = random_prompt(rng, 90)
    assert_greedy(llm, prompt, llm.generate(prompt, SamplingParams(60, ignore_eos=True), "off")[0].token_ids, 60)
    llm.check()


@KINDS
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_another_attention_backend_gives_the_same(family, rng):
    llm = make_llm(family, attention="flex")
    assert llm.adapter.attention.backend.name == "flex"
    prompt = random_prompt(rng, 60)
    assert_greedy(llm, prompt, llm.generate(prompt, SamplingParams(30, ignore_eos=True), "off")[0].token_ids, 30)


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("max_rows", [10, 4096])
def test_logits_of_all_positions_are_the_models_own(family, max_rows, rng):
    """The first position is a prompt, all others its continuation: fed in pieces of a window."""
    llm = make_llm(family, max_rows=max_rows)
    token_ids = random_prompt(rng, 150)
    for prompt_len in (1, 100):
        score = llm.score(token_ids[:prompt_len], token_ids[prompt_len:], "off")
        assert_close(score.logits, stock_logits(llm, token_ids)[prompt_len - 1 : -1])
    llm.check()
    assert llm.space.held_bytes == 0


@ALL_KINDS
def test_sequences_side_by_side_are_exact(family, rng):
    llm = make_llm(family)
    prompts = [random_prompt(rng, length) for length in (5, 60, 140, 23)]
    streams = [llm.stream(prompt, SamplingParams(50, ignore_eos=True), "exact") for prompt in prompts]
    tokens = [[] for _ in prompts]
    for parts in zip(*streams, strict=True):
        for own, part in zip(tokens, parts, strict=True):
            own.append(part.token_id)
        llm.check()
    for prompt, own in zip(prompts, tokens, strict=True):
        assert_greedy(llm, prompt, own, 50)


@ALL_KINDS
def test_chat_extends_its_exact_prefix(family, rng):
    llm = make_llm(family)
    history = random_prompt(rng, 100)
    cached = 0
    for _ in range(4):
        output = llm.generate(history, SamplingParams(40, ignore_eos=True), "exact")[0]
        assert output.report.exact_tokens == cached
        assert_greedy(llm, history, output.token_ids, 40)
        cached = len(history) + 39
        history = np.concatenate([history, output.token_ids, random_prompt(rng, 10)])
        llm.check()


@KINDS
def test_shared_document_in_front_of_other_questions_is_an_exact_prefix(family, rng):
    """Windows of a whole prompt stay cached while there is room, so that a branch in its middle can be matched."""
    llm = make_llm(family)
    document = random_prompt(rng, 200)
    first, second = (np.concatenate([document, random_prompt(rng, 40)]) for _ in range(2))
    llm.generate(first, GREEDY, "exact")
    output = llm.generate(second, GREEDY, "exact")[0]
    assert output.report.exact_tokens == 200
    assert_greedy(llm, second, output.token_ids, 8)


@KINDS
@pytest.mark.parametrize("evicted", [1, 60, 130, 150, 300])
def test_prefix_whose_windows_were_partly_evicted_is_exact(family, evicted, rng):
    llm = make_llm(family)
    prompt = random_prompt(rng, 200)
    llm.generate(prompt, GREEDY, "exact")
    llm.space.release_forgotten(llm.space.prefix.evict(0, evicted))
    llm.check()
    longer = np.concatenate([prompt, random_prompt(rng, 30)])
    for target in (prompt[:120], longer):
        assert_greedy(llm, target, llm.generate(target, GREEDY, "exact")[0].token_ids, 8)
        llm.check()


def test_request_holds_no_more_than_its_window_while_it_decodes(rng):
    llm = make_llm()
    stream = llm.stream(random_prompt(rng, 150), SamplingParams(400, ignore_eos=True), "exact")
    held = [(llm.usage().request, llm.space.window_usage().request) for _ in stream]
    full, window = np.array(held)[:-1].T
    assert full[-1] > 540
    assert window.max() <= WINDOW + 16, "what is behind the window is given back with the prompt's last row"


def test_decoding_frees_window_slots_for_good(rng):
    """Of a long output the cache keeps one window; all else of it is free, not merely evictable."""
    llm = make_llm()
    llm.generate(random_prompt(rng, 50), SamplingParams(300, ignore_eos=True), "exact")
    assert llm.usage().cached == 349
    assert llm.space.window_usage().cached <= 50 + WINDOW + 32
    assert llm.space.held_bytes < 349 * llm.adapter.pool.bytes_per_token / 2


@pytest.mark.parametrize(("share", "most"), [pytest.param(0.5, 0.75, marks=pytest.mark.slow), (0.01, 0.35)])
def test_hybrid_chat_holds_less_than_one_on_a_full_cache(share, most, rng, monkeypatch):
    """With room to spare the windows of prompts stay cached and those of outputs do not; without, one window is kept."""
    monkeypatch.setattr(slot_plan, "_MAX_WINDOW_SHARE", share)
    register_radix_cache_backend("full", lambda context: RadixCache(context.page_size))
    layers = {"num_hidden_layers": 6}
    hybrid, full = make_llm(layers=layers, max_running=1), make_llm(layers=layers, radix_cache_backend="full")
    assert type(full.space.layers) is LayerSlots
    history = random_prompt(rng, 60)
    for _ in range(5):
        outputs = [llm.generate(history, SamplingParams(80, ignore_eos=True), "exact")[0] for llm in (hybrid, full)]
        assert outputs[0].token_ids == outputs[1].token_ids
        history = np.concatenate([history, outputs[0].token_ids, random_prompt(rng, 20)])
    assert hybrid.usage().cached == full.usage().cached
    assert hybrid.space.held_bytes < most * full.space.held_bytes


@ALL_KINDS
def test_far_too_few_window_slots_change_nothing_but_time(family, rng, few_windows):
    llm = make_llm(family, num_slots=1_500)
    assert llm.adapter.pool.num_window_slots == slot_plan.fewest_window_slots(WINDOW)
    prompts = [random_prompt(rng, length) for length in (400, 90, 250, 30, 120)]
    streams = [llm.stream(prompt, SamplingParams(40, ignore_eos=True), "exact") for prompt in prompts]
    tokens = [[part.token_id for part in stream] for stream in streams]
    for prompt, own in zip(prompts, tokens, strict=True):
        assert_greedy(llm, prompt, own, 40)
    llm.check()


@KINDS
def test_streams_that_do_not_fit_side_by_side_are_preempted_and_exact(family, rng, few_windows):
    llm = make_llm(family, num_slots=1_500, stream_slowdown=1e6)  # no prompt waits for its turn
    prompts = [random_prompt(rng, 5) for _ in range(6)]
    streams = [llm.stream(prompt, SamplingParams(80, ignore_eos=True), "exact") for prompt in prompts]
    outputs = [[] for _ in prompts]
    for parts in zip(*streams, strict=True):
        for own, part in zip(outputs, parts, strict=True):
            own.append(part)
        llm.check()
    assert sum(parts[-1].output.num_preemptions for parts in outputs) > 0
    for prompt, parts in zip(prompts, outputs, strict=True):
        assert_greedy(llm, prompt, parts[-1].output.token_ids, 80)
    assert llm.space.window_usage().request == 0


@KINDS
def test_cached_prompt_does_not_pin_the_window_space(family, rng, few_windows):
    """A lock covers whole nodes; a long one is cut, or the request that matched it could not go on."""
    llm = make_llm(family, num_slots=1_500)
    prompt = random_prompt(rng, 100)
    llm.generate(prompt, GREEDY, "exact")
    longer = np.concatenate([prompt, random_prompt(rng, 300)])
    output = llm.generate(longer, GREEDY, "exact")[0]
    assert output.report.exact_tokens > 0
    assert_greedy(llm, longer, output.token_ids, 8)


@pytest.mark.parametrize("family", HYBRIDS)
def test_document_behind_a_new_beginning_is_grafted(family, rng):
    llm = make_llm(family)
    document = random_prompt(rng, 200)
    llm.generate(document, GREEDY)
    prompt = np.concatenate([random_prompt(rng, 50), document, random_prompt(rng, 10)])
    report = llm.generate(prompt, GREEDY)[0].report
    assert report.shifted_tokens == 200
    assert report.computed_tokens == 60
    assert llm.num_errors == 0
    llm.check()


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("selection", ["query_seam", "first_k"])
def test_graft_of_a_hybrid_model_is_what_one_space_gives(family, selection, rng):
    """The same spans from the same donors: window slots and captured K/V must not change a single token."""
    register_radix_cache_backend("full", lambda context: RadixCache(context.page_size))
    hybrid = make_llm(family, selection=selection, max_rows=64)
    full = make_llm(family, selection=selection, radix_cache_backend="full")
    document, other = random_prompt(rng, 220), random_prompt(rng, 80)
    prompt = np.concatenate(
        [random_prompt(rng, 50), document[10:210], random_prompt(rng, 30), other, random_prompt(rng, 9)]
    )
    scores = []
    for llm in (hybrid, full):
        llm.generate([document, other], GREEDY)
        scores.append(llm.score(prompt, prompt[:20]))
        assert llm.num_errors == 0
    assert scores[0].report.shifted_tokens == scores[1].report.shifted_tokens > 200
    assert_close(scores[0].logits, scores[1].logits)


@pytest.mark.parametrize("family", HYBRIDS)
def test_recomputing_everything_reused_gives_the_full_prefill(family, rng):
    llm = make_llm(family, selection="first_k", first_k=200)
    document = random_prompt(rng, 200)
    llm.generate(document, GREEDY)
    prompt = np.concatenate([random_prompt(rng, 50), document, random_prompt(rng, 10)])
    score = llm.score(prompt, [3])
    assert score.report.recomputed_tokens == 200
    assert_close(score.logits[0], stock_logits(llm, prompt)[-1])


@KINDS
def test_long_prompt_becomes_a_donor_though_its_windows_have_left(family, rng, few_windows):
    """What leaves the window during a prefill in pieces is captured; the donor is whole."""
    llm = make_llm(family, num_slots=1_500)
    document = random_prompt(rng, 500)
    llm.generate(document, GREEDY)
    assert [donor.num_tokens for donor in llm.space.donors] == [500]
    assert llm.space.host.used_bytes == 500 * llm.adapter.pool.bytes_per_token
    prompt = np.concatenate([random_prompt(rng, 20), document[100:160], random_prompt(rng, 5)])
    assert llm.generate(prompt, GREEDY)[0].report.shifted_tokens == 60
    llm.check()


def test_graft_that_does_not_fit_into_the_window_slots_is_a_miss(rng, few_windows):
    llm = make_llm(num_slots=1_500)
    document = random_prompt(rng, 300)
    llm.generate(document, GREEDY)
    prompt = np.concatenate([random_prompt(rng, 20), document, random_prompt(rng, 5)])
    output = llm.generate(prompt, GREEDY)[0]
    assert output.report.miss.reason is MissReason.NO_ROOM
    assert_greedy(llm, prompt, output.token_ids, 8)
    llm.check()


def test_without_host_memory_there_are_no_donors_of_hybrid_models(rng):
    llm = make_llm(host_bytes=0)
    document = random_prompt(rng, 200)
    llm.generate(document, GREEDY)
    assert not len(llm.space.donors)
    prompt = np.concatenate([random_prompt(rng, 50), document])
    output = llm.generate(prompt, GREEDY)[0]
    assert output.report.miss.reason is MissReason.NO_DONORS
    assert_greedy(llm, prompt, output.token_ids, 8)


@pytest.mark.parametrize("reuse", ["off", "exact"])
def test_requests_without_grafts_leave_no_copies_on_the_host(reuse, rng):
    llm = make_llm()
    llm.generate(random_prompt(rng, 200), GREEDY, reuse)
    assert llm.space.host.used_bytes == 0


def test_little_host_memory_keeps_the_donors_worth_most(rng):
    llm = make_llm(host_bytes=250 * make_llm().adapter.pool.bytes_per_token)
    for _ in range(4):
        llm.generate(random_prompt(rng, 100), GREEDY)
        llm.check()
    assert llm.space.num_dropped > 0
    assert llm.space.host.used_bytes <= llm.space.host.budget_bytes


def test_failed_capture_is_a_counted_miss(rng, few_windows, monkeypatch, caplog):
    llm = make_llm(num_slots=1_500)
    prompt = random_prompt(rng, 300)

    def broken(*_):
        raise RuntimeError("no copy today")

    monkeypatch.setattr(llm.adapter.pool, "export_windows", broken)
    monkeypatch.setattr(llm.space, "copy_to_host", broken)
    output = llm.generate(prompt, GREEDY)[0]
    assert_greedy(llm, prompt, output.token_ids, 8)
    assert llm.num_errors > 0
    assert "no copy today" in caplog.text
    llm.check()


def test_closed_stream_releases_both_kinds_of_slots(rng):
    llm = make_llm()
    for steps in (1, 30):
        stream = llm.stream(random_prompt(rng, 80), SamplingParams(100, ignore_eos=True))
        for _ in range(steps):
            next(stream)
        stream.close()
        llm.check()
        assert llm.usage().request == llm.space.window_usage().request == 0


def test_reset_gives_every_slot_of_both_spaces_back(rng):
    llm = make_llm()
    llm.generate(random_prompt(rng, 200), GREEDY)
    llm.reset()
    llm.check()
    assert llm.space.held_bytes == llm.space.host.used_bytes == 0


@pytest.mark.parametrize("family", ["gemma3_text", "llama"])
def test_stream_goes_on_when_everything_cached_is_forgotten(family, rng):
    """Its locks are of an epoch that is over; giving them back must not be an error."""
    llm = make_llm(family)
    prompt = random_prompt(rng, 100)
    llm.generate(prompt, GREEDY, "exact")
    stream = llm.stream(prompt, SamplingParams(60, ignore_eos=True), "exact")
    tokens = [next(stream).token_id for _ in range(3)]
    llm.reset()
    tokens += [part.token_id for part in stream]
    assert_greedy(llm, prompt, tokens, 60)
    assert llm.num_errors == 0
    llm.check()


def test_score_that_finds_no_window_slots_says_so(rng, few_windows):
    llm = make_llm(num_slots=1_500)
    streams = [llm.stream(random_prompt(rng, 5), SamplingParams(90, ignore_eos=True), "exact") for _ in range(3)]
    for _ in range(40):
        for stream in streams:
            next(stream)
    with pytest.raises(CapacityError, match="window layers"):
        llm.score(random_prompt(rng, 200), [3, 4], "exact")
    llm.check()


def test_prefix_cache_that_knows_no_windows_keeps_one_space(rng):
    register_radix_cache_backend("plain", lambda context: RadixCache(context.page_size))
    llm = make_llm(radix_cache_backend="plain")
    prompt = random_prompt(rng, 100)
    assert type(llm.space.layers) is LayerSlots
    assert_greedy(llm, prompt, llm.generate(prompt, GREEDY, "exact")[0].token_ids, 8)


@ALL_KINDS
def test_named_hybrid_cache_in_pages_is_exact(family, rng):
    register_radix_cache_backend(
        "pages",
        lambda context: SWARadixCache(
            8,
            sliding_window_size=context.sliding_window_size,
            attention_chunk_size=context.attention_chunk_size,
            leaf_cap=True,
        ),
    )
    llm = make_llm(family, radix_cache_backend="pages")
    history = random_prompt(rng, 101)
    for _ in range(4):
        output = llm.generate(history, SamplingParams(45, ignore_eos=True), "exact")[0]
        assert_greedy(llm, history, output.token_ids, 45)
        llm.check()
        history = np.concatenate([history, output.token_ids])
    assert output.report.exact_tokens > 200


def test_hybrid_cache_of_another_window_is_refused_in_one_line():
    register_radix_cache_backend("wrong", lambda _: SWARadixCache(sliding_window_size=7))
    for family in ("gemma3_text", "llama", "llama4_text"):
        with pytest.raises(ConfigError, match="windows of 7 tokens") as caught:
            make_llm(family, radix_cache_backend="wrong")
        assert "\n" not in str(caught.value)


@KINDS
def test_split_of_the_two_pools_is_a_setting(family, rng):
    llm = make_llm(family, hybrid_kvcache_ratio=0.2, max_running=10)
    assert (llm.adapter.pool.num_slots, llm.adapter.pool.num_window_slots) == (2_000, 400)
    prompts = [random_prompt(rng, 60) for _ in range(10)]
    streams = [llm.stream(prompt, SamplingParams(40, ignore_eos=True), "exact") for prompt in prompts]
    outputs = [parts[-1].output for parts in zip(*zip(*streams, strict=True), strict=True)]
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_greedy(llm, prompt, output.token_ids, 40)
    with pytest.raises(ConfigError, match="hybrid_kvcache_ratio gives 200 slots of window layers"):
        make_llm(family, hybrid_kvcache_ratio=0.1, max_running=10)
