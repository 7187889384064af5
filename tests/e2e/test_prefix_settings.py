"""What users can say about the prefix cache of the embedded engine: pages, eviction, back ends and what these are told."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from tests.engine_runs import SMALL
from tests.support.families import families
from tests.support.kept_kv import assert_prefix_is_exact

from kvgraft.cli import main
from kvgraft.engine import LLM, SamplingParams
from kvgraft.engine.core import Engine
from kvgraft.engine.model.loading import adopt_model
from kvgraft.engine.requests.options import RequestOptions
from kvgraft.errors import ConfigError
from kvgraft.prefix import EVICTION_POLICIES, RadixCache, TreeCacheBuildContext, register_radix_cache_backend
from kvgraft.testing.tiny_models import VOCABULARY, tiny_model

PAGES = [1, 16, pytest.param(64, marks=pytest.mark.slow)]
FAMILIES = families(["llama", "gemma2"], quick=["llama"])
GREEDY = SamplingParams(8, ignore_eos=True)


def make_llm(family="llama", **settings):
    return LLM(
        adopt_model(family, tiny_model(family), None), **(SMALL | {"num_slots": 2_000, "selection": "none"} | settings)
    )


def random_prompt(rng, length):
    return rng.integers(3, VOCABULARY, length)


@torch.inference_mode()
def assert_greedy(llm, prompt, answer, count):
    """Assert that stock transformers answers so: one pass over prompt and answer says each token's successor."""
    assert len(answer) == count
    with llm.adapter.stock() as model:
        logits = model(torch.from_numpy(np.concatenate([prompt, answer]))[None], use_cache=False).logits[0]
    assert list(answer) == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


def in_pages(num_tokens, page_size):
    return num_tokens // page_size * page_size


# pages


@FAMILIES
@pytest.mark.parametrize("page_size", PAGES)
def test_chat_extends_its_prefix_in_whole_pages_and_is_exact(family, page_size, rng):
    """Turns are longer than the window of 24, so that what is stored must end with a whole window."""
    llm = make_llm(family, page_size=page_size)
    history, stored = random_prompt(rng, 101), 0
    for _ in range(4):
        output = llm.generate(history, SamplingParams(40, ignore_eos=True), "exact")[0]
        assert output.report.exact_tokens == in_pages(stored, page_size)
        assert_greedy(llm, history, output.token_ids, 40)
        llm.check()
        stored = len(history) + 39
        history = np.concatenate([history, output.token_ids, random_prompt(rng, 10)])
    assert assert_prefix_is_exact(
        llm.adapter, llm.space, llm.engine.builder.build(history).namespace, history
    ) == in_pages(stored, page_size)


@FAMILIES
@pytest.mark.parametrize("page_size", PAGES)
def test_grafts_start_behind_the_whole_pages(family, page_size, rng):
    """A prompt that was read, asked for again: the end of its last page is grafted from itself, at no shift."""
    llm = make_llm(family, page_size=page_size)
    prompt = random_prompt(rng, 200)
    first, again = llm.generate([prompt, prompt], GREEDY)
    assert again.token_ids == first.token_ids
    assert_greedy(llm, prompt, first.token_ids, 8)
    exact_tokens = in_pages(199, page_size)
    assert again.report.exact_tokens == exact_tokens
    grafted = 199 - exact_tokens if 199 - exact_tokens >= llm.config.min_run else 0
    assert again.report.shifted_tokens == grafted
    assert all(span.target_start >= exact_tokens for span in again.report.spans)
    llm.check()


@FAMILIES
@pytest.mark.parametrize("page_size", PAGES)
def test_moved_text_is_stored_as_nobodys_prefix(family, page_size, rng):
    llm = make_llm(family, page_size=page_size)
    document, head = random_prompt(rng, 150), random_prompt(rng, 70)
    prompt = np.concatenate([head, document, random_prompt(rng, 5)])
    llm.generate([np.concatenate([head, random_prompt(rng, 5)]), document], GREEDY)
    grafted = llm.generate(prompt, GREEDY)[0]
    assert grafted.report.shifted_tokens >= 100
    exact_tokens = grafted.report.exact_tokens
    assert exact_tokens == in_pages(70, page_size)
    again = llm.generate(prompt, GREEDY, "exact")[0]
    assert again.report.exact_tokens <= exact_tokens, "nothing at or behind a graft is found as exact"
    # The grafted request left the window of its prefix behind, and where nothing continues that it was the last to need it.
    assert again.report.exact_tokens == exact_tokens or family == "gemma2"
    assert_greedy(llm, prompt, again.token_ids, 8)
    llm.check()


@FAMILIES
@pytest.mark.parametrize("page_size", PAGES)
def test_preempted_and_reset_requests_are_exact(family, page_size, rng):
    llm = make_llm(family, page_size=page_size, num_slots=420)
    engine = llm.engine
    assert isinstance(engine, Engine)
    prompts = [random_prompt(rng, length) for length in (90, 33, 128)]
    streams = [llm.stream(prompt, SamplingParams(60, ignore_eos=True), "exact") for prompt in prompts]
    tokens = [[] for _ in prompts]
    for number, parts in enumerate(zip(*streams, strict=True)):
        for own, part in zip(tokens, parts, strict=True):
            own.append(part.token_id)
        if number in (10, 30) and engine.scheduler.running:
            engine.scheduler.preempt(engine.scheduler.running[0])
        if number == 40:
            llm.reset()
        llm.check()
    assert engine.scheduler.num_preemptions >= 2
    for prompt, own in zip(prompts, tokens, strict=True):
        assert_greedy(llm, prompt, own, 60)
    assert llm.num_errors == 0


def test_text_below_a_page_is_never_stored(rng):
    llm = make_llm(page_size=64)
    _, again = llm.generate([random_prompt(rng, 50)] * 2, GREEDY, "exact")
    assert (again.report.exact_tokens, llm.usage().cached) == (0, 0)


def test_pages_larger_than_the_pool_are_refused_in_one_line():
    with pytest.raises(ConfigError, match="page_size=500 is more than the 200 K/V slots") as caught:
        make_llm(page_size=500, num_slots=200)
    assert "\n" not in str(caught.value)


# eviction


@pytest.mark.parametrize("policy", sorted(EVICTION_POLICIES))
def test_each_policy_decides_in_the_engine(policy, rng):
    llm = make_llm(eviction_policy=policy, num_slots=300, host_bytes=0)
    assert type(llm.space.prefix.policy) is EVICTION_POLICIES[policy]
    for _ in range(6):
        prompt = random_prompt(rng, 120)
        assert_greedy(llm, prompt, llm.generate(prompt, GREEDY, "exact")[0].token_ids, 8)
        llm.check()


def survivors(llm, prompts):
    """Which prompts are still prefixes when a further one has needed room."""
    return [llm.space.match(key).prefix_len > 100 for key in (key_of(llm, prompt) for prompt in prompts)]


def key_of(llm, prompt):
    from kvgraft.prefix import RadixKey

    return RadixKey(prompt, llm.engine.builder.build(prompt).namespace.key)


DONORS = [{}, {"host_bytes": 0}, {"donor_tokens": 16}]
"""Donors share slots with prefixes: they spill, are dropped, or there are none. What leaves first is the policy's to say."""


@pytest.mark.parametrize("donors", DONORS, ids=str)
@pytest.mark.parametrize(("policy", "kept"), [("lru", [False, True]), ("mru", [True, False]), ("fifo", [False, True])])
def test_policies_differ_in_what_they_keep(policy, kept, donors, rng):
    llm = make_llm(eviction_policy=policy, num_slots=400, **donors)
    prompts = [random_prompt(rng, 140) for _ in range(2)]
    llm.generate(prompts, GREEDY, "exact")
    llm.generate(random_prompt(rng, 140), GREEDY, "exact")
    assert survivors(llm, prompts) == kept


@pytest.mark.parametrize("donors", DONORS, ids=str)
def test_higher_priority_stays_longer(donors, rng):
    kept = {}
    for first, second in ((0, 0), (1, 0)):
        llm = make_llm(eviction_policy="priority", num_slots=400, **donors)
        prompts = [random_prompt(rng, 140) for _ in range(2)]
        llm.generate(prompts[0], GREEDY, "exact", priority=first)
        llm.generate(prompts[1], GREEDY, "exact", priority=second)
        llm.generate(random_prompt(rng, 140), GREEDY, "exact")
        kept[first] = survivors(llm, prompts)
    assert kept == {0: [False, True], 1: [True, False]}


@FAMILIES
def test_slru_protects_what_two_requests_used_and_not_what_one_stored_twice(family, rng):
    """A request stores its prompt when it is computed and again, with its output, when it ends."""
    llm = make_llm(family, eviction_policy="slru", eviction_policy_config='{"protected_threshold": 2}')
    once, twice = random_prompt(rng, 140), random_prompt(rng, 140)
    llm.generate([once, twice, twice], GREEDY, "exact")
    hits = [max(node.hit_count for node in path_of(llm, prompt)) for prompt in (once, twice)]
    assert hits == [1, 2]


@FAMILIES
def test_a_preempted_request_uses_its_prefix_once(family, rng):
    llm = make_llm(family, eviction_policy="lfu")
    prompt = random_prompt(rng, 140)
    stream = llm.stream(prompt, SamplingParams(20, ignore_eos=True), "exact")
    tokens = [next(stream).token_id for _ in range(5)]
    llm.engine.scheduler.preempt(llm.engine.scheduler.running[0])
    tokens += [part.token_id for part in stream]
    assert_greedy(llm, prompt, tokens, 20)
    assert max(node.hit_count for node in path_of(llm, prompt)) == 1


@FAMILIES
def test_a_request_that_is_preempted_again_in_its_prefill_uses_its_prefix_once(family, rng):
    llm = make_llm(family, eviction_policy="lfu")
    scheduler = llm._engine.scheduler
    prompt = random_prompt(rng, 140)
    stream = llm.stream(prompt, SamplingParams(20, ignore_eos=True), "exact")
    tokens = [next(stream).token_id for _ in range(5)]
    scheduler.preempt(scheduler.running[0])
    scheduler.schedule()
    assert scheduler.running[0].is_prefilling
    scheduler.preempt(scheduler.running[0])
    tokens += [part.token_id for part in stream]
    assert_greedy(llm, prompt, tokens, 20)
    assert max(node.hit_count for node in path_of(llm, prompt)) == 1


def path_of(llm, prompt):
    node = llm.space.prefix.root_handle
    for _ in range(100):
        found = [child for child in node.children.values() if child.token_ids[0] == prompt[node.end]]
        if not found:
            return
        (node,) = found
        yield node
        if node.end >= 130:
            return


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eviction_policy": "random"}, "unknown eviction_policy 'random'; choose fifo, filo, lfu, lru, mru, priority"),
        (
            {"eviction_policy": "slru", "eviction_policy_config": '{"threshold": 2}'},
            "eviction_policy_config: eviction policy 'slru' has no parameter 'threshold'; it has protected_threshold",
        ),
        (
            {"eviction_policy": "slru", "eviction_policy_config": '{"protected_threshold": 0}'},
            "protected_threshold must be at least 1, not 0",
        ),
        ({"eviction_policy_config": "[1]"}, "eviction_policy_config must be a JSON object"),
        ({"radix_cache_options": "{"}, "radix_cache_options must be a JSON object"),
        ({"page_size": 0}, "page_size must be at least 1"),
        ({"kv_events": "5557"}, "unknown kv_events '5557'; choose tcp://*:PORT, ipc://PATH"),
        ({"kv_events": '{"port": 1}'}, "kv_events has no field 'port'; it has endpoint, replay_endpoint, topic"),
        ({"kv_events": '{"topic": 1}'}, "topic of kv_events must be of type str, not 1"),
        ({"kv_events": "{1}"}, "kv_events is no valid JSON"),
    ],
)
def test_wrong_values_are_told_in_one_line_before_a_model_is_loaded(settings, message):
    with pytest.raises(ConfigError) as caught:
        LLM("no such model", **settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# a cache of another package that fails


class BrokenCache(RadixCache):
    """Raises in the methods that are named; in those of `once` a single time."""

    broken: frozenset[str] = frozenset()
    once: frozenset[str] = frozenset()

    def match_prefix(self, params):
        self._fail("match_prefix")
        return super().match_prefix(params)

    def inc_lock_ref(self, handle):
        self._fail("inc_lock_ref")
        return super().inc_lock_ref(handle)

    def insert(self, *args, **options):
        self._fail("insert")
        return super().insert(*args, **options)

    def look(self, key):
        self._fail("look")
        return super().look(key)

    def dec_lock_ref(self, handle):
        self._fail("dec_lock_ref")
        return super().dec_lock_ref(handle)

    def evict(self, num_tokens):
        self._fail("evict")
        return super().evict(num_tokens)

    def _fail(self, method):
        if method in self.broken:
            self.broken -= self.once
            raise KeyError(f"no {method}")


def make_broken(**settings):
    caches = []
    register_radix_cache_backend("broken", lambda context: caches.append(BrokenCache(context.page_size)) or caches[-1])
    return make_llm(radix_cache_backend="broken", **settings), caches[0]


@pytest.mark.parametrize("method", ["match_prefix", "inc_lock_ref", "insert"])
def test_a_cache_that_fails_costs_its_prefix_and_no_request(method, rng):
    llm, cache = make_broken()
    document, question = random_prompt(rng, 100), random_prompt(rng, 20)
    llm.generate(document, GREEDY, "exact")
    prompt = np.concatenate([document, question])
    errors = llm.num_errors
    cache.broken = frozenset({method})
    output = llm.generate(prompt, GREEDY, "exact")[0]
    assert_greedy(llm, prompt, output.token_ids, 8)
    assert (output.report.exact_tokens > 0) == (method == "insert")
    assert llm.num_errors > errors
    llm.check()
    cache.broken = frozenset()
    assert llm.generate(prompt, GREEDY, "exact")[0].report.exact_tokens >= len(document)
    llm.check()


def test_a_cache_that_takes_no_lock_back_keeps_its_prefix_and_no_slots_of_requests(rng):
    llm, cache = make_broken()
    document = random_prompt(rng, 100)
    llm.generate(document, GREEDY, "exact")
    cache.broken = frozenset({"dec_lock_ref"})
    prompt = np.concatenate([document, random_prompt(rng, 20)])
    assert_greedy(llm, prompt, llm.generate(prompt, GREEDY, "exact")[0].token_ids, 8)
    assert llm.num_errors == 1
    llm.check()
    assert llm.usage().request == 0
    session = llm.open_session()
    llm.generate(random_prompt(rng, 50), GREEDY, "exact", session_id=session)
    llm.close_session(session)
    llm.check()
    assert llm.num_errors == 3, "the turn's lock and the session's"


def test_a_cache_that_fails_to_evict_once_costs_no_request_its_answer(rng):
    """Two answers grow into the room that a prefix has: one of them waits for the other."""
    llm, cache = make_broken(num_slots=220)
    llm.generate(random_prompt(rng, 60), SamplingParams(1), "exact")
    prompts, engine = [random_prompt(rng, 40), random_prompt(rng, 40)], llm.engine
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(64, ignore_eos=True)
        engine.add(engine.builder.build(prompt, RequestOptions(sampling, "exact", request_id=str(number))))
    while len(engine.scheduler.running) < 2:
        engine.step()
    cache.broken, cache.once, outputs = frozenset({"evict"}), frozenset({"evict"}), {}
    while engine.has_work:
        for event in engine.step():
            assert event.error is None
            if event.part.output is not None:
                outputs[event.request_id] = event.part.output.token_ids
    assert set(outputs) == set(map(str, range(len(prompts))))
    for number, prompt in enumerate(prompts):
        assert_greedy(llm, prompt, outputs[str(number)], 64)
    assert llm.num_errors == 1
    llm.check()


def test_a_cache_that_cannot_be_looked_into_ends_no_step_that_heals(rng):
    """Nothing reuses the text, and room is short: whether it is worth healing depends on what is stored of it."""
    llm, cache = make_broken(num_slots=460, selection="query_seam")
    document = random_prompt(rng, 150)
    llm.generate(document, GREEDY)
    prompt = np.concatenate([random_prompt(rng, 20), document, random_prompt(rng, 30)])
    assert llm.generate(prompt, GREEDY)[0].report.shifted_tokens
    for _ in range(2):
        llm.generate(random_prompt(rng, 140), GREEDY, "exact")
    cache.broken, errors = frozenset({"look"}), llm.num_errors
    assert llm.heal() == 0
    assert llm.num_errors > errors
    llm.check()


def test_a_session_whose_prefix_cannot_be_locked_keeps_no_slots(rng):
    llm, cache = make_broken(page_size=16)
    session = llm.open_session()
    cache.broken = frozenset({"inc_lock_ref"})
    llm.generate(random_prompt(rng, 90), GREEDY, "exact", session_id=session)
    llm.check()
    assert llm.usage().cached == in_pages(97, 16)


# what a factory of somebody else's is told


def told(family, **settings):
    contexts = []

    def factory(context):
        contexts.append(context)
        return RadixCache(context.page_size, policy=context.eviction_policy, events=context.events)

    register_radix_cache_backend("theirs", factory)
    llm = make_llm(family, radix_cache_backend="theirs", **settings)
    (context,) = contexts
    return llm, context


def test_a_factory_is_told_of_model_pools_and_settings():
    llm, context = told(
        "llama",
        page_size=16,
        eviction_policy="slru",
        eviction_policy_config='{"protected_threshold": 3}',
        radix_cache_options='{"depth": 3, "tiers": ["a"]}',
        kv_events="inproc://told",
        max_rows=512,
    )
    try:
        pool = llm.adapter.pool
        assert (context.pool.num_slots, context.pool.bytes_per_token) == (pool.num_slots, pool.bytes_per_token)
        assert (context.pool.dtype, context.pool.device) == ("float32", "cpu")
        assert (context.full_pool, context.swa_pool, context.sliding_window_size) == (None, None, None)
        assert (context.is_hybrid_swa, context.is_all_swa, context.is_hybrid_ssm) == (False, False, False)
        assert context.model_config is llm.loaded.model.config.get_text_config(decoder=True)
        assert (context.model_name, context.num_layers) == (llm.loaded.name, llm.adapter.num_layers)
        assert (context.tp_size, context.tp_rank) == (1, 0)
        assert (context.page_size, context.backend) == (16, "theirs")
        assert (context.eviction_policy, context.eviction_policy_config) == ("slru", {"protected_threshold": 3})
        assert context.effective_chunked_prefill_size == 512
        assert context.disable_radix_cache is False
        assert context.options == {"depth": 3, "tiers": ["a"]}
        assert context.events is not None
    finally:
        llm.close()


@pytest.mark.parametrize(("family", "is_all"), [("gemma2", False), ("mistral", True), ("llama4_text", False)])
def test_a_factory_is_told_of_both_pools_of_a_hybrid_model(family, is_all):
    _, context = told(family)
    default = make_llm(family).adapter.pool
    assert (context.is_hybrid_swa, context.is_all_swa) == (not is_all, is_all)
    sizes = (context.sliding_window_size, context.attention_chunk_size)
    assert sizes == ((None, 24) if family == "llama4_text" else (24, None))
    assert context.full_pool.num_slots == default.num_slots
    assert context.full_pool.bytes_per_token == default.full_bytes_per_token
    assert context.swa_pool.num_slots == default.num_window_slots
    assert context.swa_pool.bytes_per_token == default.window.bytes_per_token
    assert context.events is None


def test_the_engine_says_something_about_every_field():
    """A field that the engine leaves at its default is known here, with the reason."""
    _, context = told("gemma2", page_size=8, eviction_policy="lfu", radix_cache_options="{}")
    left = {
        field.name
        for field in dataclasses.fields(TreeCacheBuildContext)
        if getattr(context, field.name) == getattr(TreeCacheBuildContext(), field.name)
    }
    one_rank, without_settings = {"tp_size", "tp_rank"}, {"eviction_policy_config", "options", "events"}
    not_of_this_model = {
        *("attention_chunk_size", "is_all_swa", "is_hybrid_ssm", "state_chunk_size", "disable_radix_cache"),
    }
    nothing_to_ask_for = {"use_native_tree", "use_unified_tree", "external_backend"}
    tiers = {
        "enable_hierarchical_cache",
        "tier_transfer",
        "state_tier_transfer",
        "host_write_policy",
        "enable_streaming_session",
    }
    assert left <= one_rank | without_settings | not_of_this_model | nothing_to_ask_for | tiers


# the command line


def test_serve_knows_the_settings(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--help-all"])
    text = capsys.readouterr().out
    for flag in (
        "--page-size",
        "--eviction-policy",
        "--eviction-policy-config",
        "--kv-events",
        "--radix-cache-options",
    ):
        assert flag in text


def test_a_file_may_give_parameters_as_a_mapping(tmp_path, capsys):
    path = tmp_path / "server.yaml"
    path.write_text(
        "eviction_policy: slru\neviction_policy_config: {protected_threshold: 3}\nkv_events: 'tcp://*:5557'\n"
    )
    assert main(["config", "validate", str(path)]) == 0
    assert main(["config", "show", "--config", str(path)]) == 0
    assert "protected_threshold" in capsys.readouterr().out
