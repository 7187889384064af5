"""Models with layers that keep a state, and host memory for prefixes: what left the device comes back, with its state."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.support.families import families
from tests.support.states import STATE_MODELS, ColdRuns

from kvgraft.engine import LLM, SamplingParams
from kvgraft.engine.memory_use import MemoryUse
from kvgraft.engine.model.loading import adopt_model
from kvgraft.errors import ConfigError, CorruptCacheError
from kvgraft.memory import Owner
from kvgraft.prefix import HierarchicalStateCache, RadixKey, StateRadixCache, register_radix_cache_backend
from kvgraft.testing.tiny_models import VOCABULARY, tiny_model

ALL = families(STATE_MODELS, quick=["qwen3_next", "lfm2"])
HOST_BYTES = 4 << 20


def make_llm(family="granitemoehybrid", **settings):
    """An engine with room for two conversations on the device."""
    settings = {"num_slots": 130, "max_running": 2, "prefix_host_bytes": HOST_BYTES, "host_bytes": 0} | settings
    return LLM(adopt_model(family, tiny_model(family), None), **settings)


def random_prompt(rng, length):
    return rng.integers(3, VOCABULARY, length)


@torch.inference_mode()
def assert_greedy(llm, prompt, answer):
    """Assert that stock transformers answers so: one pass over prompt and answer says each token's successor."""
    token_ids = np.concatenate([prompt, answer])
    with llm.adapter.stock() as model:
        logits = model(torch.from_numpy(token_ids)[None], use_cache=False).logits[0]
    assert list(answer) == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


def ask(llm, prompt, reuse="exact", **options):
    """The answer to a prompt, which is the model's own; everything holds after it."""
    output = llm.generate(prompt, SamplingParams(4, ignore_eos=True), reuse, **options)[0]
    llm.check()
    assert_greedy(llm, prompt, output.token_ids)
    return output


def converse(llm, rng, reuse="exact", turns=2, chats=3):
    """Chats that take turns, more than the device holds; returns how many tokens of each prompt were exact."""
    histories = [random_prompt(rng, 50) for _ in range(chats)]
    exact = []
    for _ in range(turns):
        for chat in range(chats):
            output = ask(llm, histories[chat], reuse)
            exact.append(output.report.exact_tokens)
            histories[chat] = np.concatenate([histories[chat], output.token_ids, random_prompt(rng, 8)])
    return exact


@ALL
def test_chats_that_take_turns_go_on_from_states_that_had_left(family, rng):
    llm = make_llm(family)
    assert isinstance(llm.space.prefix, HierarchicalStateCache)
    assert converse(llm, rng) == [0] * 3 + [50 + 3] * 3
    assert llm.space.num_loaded_tokens > 100
    assert llm.space.prefix_host_tokens > 0
    assert llm.num_errors == 0
    assert llm.usage().request == llm.space.state_usage().request == 0
    llm.reset()
    assert llm.space.prefix_host_bytes == 0
    llm.check()


def test_without_host_memory_they_begin_anew(rng):
    llm = make_llm(prefix_host_bytes=0)
    assert sum(converse(llm, rng)) == 0


@pytest.mark.parametrize(
    ("reuse", "settings"), [("off", {}), ("exact", {"page_size": 16}), ("exact", {"max_rows": 20})]
)
def test_answers_are_the_models_own_in_every_mode(reuse, settings, rng):
    llm = make_llm("granitemoehybrid", **settings)
    exact = converse(llm, rng, reuse)
    assert sum(exact) == 0 if reuse == "off" else sum(exact) >= 3 * 48
    assert llm.space.prefix_host_tokens > 0


@families(["qwen3_next", "falcon_h1"], quick=["falcon_h1"])
def test_what_was_loaded_back_is_what_a_cold_run_leaves(family, rng):
    llm = make_llm(family)
    prompts = [random_prompt(rng, 50) for _ in range(3)]
    for prompt in prompts:
        ask(llm, prompt)
    cold = ColdRuns(tiny_model(family), 200)
    before = llm.space.num_loaded_tokens
    namespace = llm.engine.builder.build(prompts[0]).namespace
    assert cold.assert_prefix_is_exact(llm.adapter, llm.space, namespace, prompts[0]) == 49
    assert llm.space.num_loaded_tokens > before
    llm.check()


@pytest.mark.parametrize("of", ["tokens", "states"])
@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_transfer_that_fails_is_a_counted_miss(of, direction, rng, monkeypatch):
    llm = make_llm()
    prompts = [random_prompt(rng, 50) for _ in range(3)]
    longer = np.concatenate([prompts[0], random_prompt(rng, 10)])
    owner = llm.space if of == "tokens" else llm.space.layers
    with monkeypatch.context() as patched:
        patched.setattr(owner._tier.slots, direction, fail)
        for prompt in (*prompts, longer):
            report = ask(llm, prompt).report
        assert report.exact_tokens == 0
        assert llm.num_errors > 0
    for prompt in prompts[1:]:
        ask(llm, prompt)
    assert ask(llm, np.concatenate([longer, random_prompt(rng, 5)])).report.exact_tokens >= len(longer) - 1


def fail(*_):
    raise RuntimeError("the link is down")


def test_requests_that_hold_the_states_leave_none_to_load_into(rng):
    """The last one is for the request that asks, which goes on from a copy."""
    llm = make_llm()
    prompt = random_prompt(rng, 50)
    ask(llm, prompt)
    key = RadixKey(prompt, llm.engine.builder.build(prompt).namespace.key)
    llm.space.release_forgotten(llm.space.prefix.evict(1_000))
    hoarded = llm.space.layers.allocate(llm.adapter.states.num_states - 1)
    match = llm.space.match(key)
    assert (match.prefix_len, match.host_hit_len) == (0, 49)
    llm.space.layers.allocator.release(hoarded, Owner.REQUEST)
    match = llm.space.match(key)
    assert (match.prefix_len, match.host_hit_len) == (49, 0)
    llm.check()


def test_a_small_host_keeps_what_it_has_room_for(rng):
    llm = make_llm(prefix_host_bytes=70_000)
    converse(llm, rng, chats=4)
    assert 0 < llm.space.prefix_host_bytes <= 70_000
    assert llm.num_errors == 0


def test_bytes_of_both_are_told(rng):
    llm = make_llm()
    converse(llm, rng, turns=1)
    used, limit = MemoryUse.of(llm.space, llm.config).pools["host_prefixes"]
    states = llm.space.prefix.host_state_size
    token_bytes, state_bytes = llm.adapter.pool.bytes_per_token, llm.adapter.states.bytes_per_state
    assert used == llm.space.prefix_host_tokens * token_bytes + states * state_bytes > states * state_bytes > 0
    assert limit == HOST_BYTES


def test_lost_host_slots_of_states_are_noticed(rng):
    llm = make_llm()
    converse(llm, rng, turns=1)
    llm.space.layers._tier.slots.store(np.arange(1))
    with pytest.raises(CorruptCacheError, match="host slots of states"):
        llm.check()


def test_a_backend_without_a_tier_is_refused():
    register_radix_cache_backend("flat", lambda context: StateRadixCache(context.page_size))
    with pytest.raises(ConfigError, match="'flat' keeps nothing in host memory"):
        make_llm(radix_cache_backend="flat")


@pytest.mark.parametrize(("num_bytes", "message"), [(100, "raise prefix_host_bytes to"), (1 << 60, "host memory")])
def test_sizes_that_cannot_be_are_refused(num_bytes, message):
    with pytest.raises(ConfigError, match=message):
        make_llm(prefix_host_bytes=num_bytes)
