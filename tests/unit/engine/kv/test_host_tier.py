"""The host tier of the engine: what comes back, what fails softly, what is refused at the start."""

from __future__ import annotations

import numpy as np
import pytest

from kvgraft.engine import LLM, SamplingParams
from kvgraft.engine.model.loading import adopt_model
from kvgraft.errors import ConfigError, CorruptCacheError
from kvgraft.prefix import RadixCache
from kvgraft.prefix.registry import register_radix_cache_backend
from kvgraft.testing.tiny_models import VOCABULARY, tiny_model

TWO = SamplingParams(2, ignore_eos=True)


def tiered(family="llama", **settings):
    sizes = {"num_slots": 200, "prefix_host_bytes": 1 << 20} | settings
    return LLM(adopt_model(family, tiny_model(family), None), **sizes)


@pytest.fixture
def prompts(rng):
    return [rng.integers(3, VOCABULARY, 120) for _ in range(3)]


def test_an_evicted_prefix_is_loaded_back(prompts):
    llm = tiered()
    cold = llm.generate(prompts[0], TWO, "exact")[0]
    llm.generate(prompts[1], TWO, "exact")  # takes the room
    assert llm.space.prefix.total_size < 200 < llm.space.prefix.total_size + llm.space.prefix_host_tokens
    warm = llm.generate(prompts[0], TWO, "exact")[0]
    assert warm.report.exact_tokens == 119
    assert warm.report.computed_tokens == 1
    assert warm.token_ids == cold.token_ids
    assert llm.space.num_loaded_tokens >= 100
    llm.check()


def test_without_host_memory_it_is_computed(prompts):
    llm = tiered(prefix_host_bytes=0)
    for prompt in (prompts[0], prompts[1], prompts[0]):
        report = llm.generate(prompt, TWO, "exact")[0].report
    assert report.exact_tokens < 60
    assert llm.space.prefix_host_tokens == 0


def test_other_salts_get_nothing(prompts):
    llm = tiered()
    llm.generate([prompts[0], prompts[1]], TWO, "exact", cache_salt="a")
    assert llm.generate(prompts[0], TWO, "exact", cache_salt="b")[0].report.exact_tokens == 0


def test_a_reset_empties_the_host(prompts):
    """K/V of weights that have changed must not live on."""
    llm = tiered()
    llm.generate(prompts, TWO, "exact")
    assert llm.space.prefix_host_tokens > 0
    llm.reset()
    assert llm.space.prefix_host_tokens == 0
    llm.check()
    assert llm.generate(prompts[0], TWO, "exact")[0].report.exact_tokens == 0


def test_a_running_request_of_before_a_reset_leaves_nothing(prompts):
    llm = tiered(num_slots=300)
    stream = llm.stream(prompts[0], SamplingParams(20, ignore_eos=True), "exact")
    next(stream)
    llm.reset()
    assert sum(1 for _ in stream) == 19
    llm.generate(prompts[1:], TWO, "exact")
    assert llm.generate(prompts[0], TWO, "exact")[0].report.exact_tokens == 0
    llm.check()


@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_transfer_that_fails_is_a_counted_miss(direction, prompts, monkeypatch):
    llm = tiered()
    cold = llm.generate(prompts[0], TWO, "exact")[0]

    def fail(*_):
        raise RuntimeError("the link is down")

    with monkeypatch.context() as patched:
        patched.setattr(llm.space._tier.slots, direction, fail)
        llm.generate(prompts[1], TWO, "exact")
        again = llm.generate(prompts[0], TWO, "exact")[0]
    assert again.token_ids == cold.token_ids
    assert again.report.exact_tokens < 119
    assert llm.num_errors > 0
    llm.check()
    assert llm.generate(prompts[0], TWO, "exact")[0].token_ids == cold.token_ids


def test_no_room_on_the_device_is_a_shorter_hit(prompts):
    """While another request holds the device nothing is loaded, and nothing breaks."""
    llm = tiered(num_slots=260)
    llm.generate(prompts[0], TWO, "exact")
    llm.generate(prompts[1], TWO, "exact")
    streams = [llm.stream(prompts[2], SamplingParams(100, ignore_eos=True), "exact")]
    next(streams[0])
    output = llm.generate(prompts[0], TWO, "exact")[0]
    assert output.report.num_tokens == 120
    llm.check()
    assert sum(1 for _ in streams[0]) == 99
    llm.check()


def test_lost_host_slots_are_noticed(prompts):
    llm = tiered()
    llm.generate(prompts, TWO, "exact")
    llm.space._tier.slots.store(np.arange(1))
    with pytest.raises(CorruptCacheError, match="host slots"):
        llm.check()


@pytest.mark.parametrize("family", ["gemma2", "mistral"])
def test_models_with_window_slots_are_refused(family):
    with pytest.raises(ConfigError, match="prefix_host_bytes is for models"):
        tiered(family, num_slots=500)


def test_a_backend_without_a_tier_is_refused():
    register_radix_cache_backend("flat", lambda context: RadixCache(context.page_size))
    with pytest.raises(ConfigError, match="'flat' keeps nothing in host memory"):
        tiered(radix_cache_backend="flat")


@pytest.mark.parametrize(("num_bytes", "message"), [(10, "hold no token"), (1 << 60, "host memory")])
def test_sizes_that_cannot_be_are_refused(num_bytes, message):
    with pytest.raises(ConfigError, match=message):
        tiered(prefix_host_bytes=num_bytes)
