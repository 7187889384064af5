from __future__ import annotations

import numpy as np
import pytest

from kvgraft.engine import LLM, SamplingParams
from kvgraft.engine.memory_use import MemoryUse
from kvgraft.engine.model.loading import adopt_model
from kvgraft.testing.tiny_models import tiny_model


def make_llm(family="llama", **settings):
    return LLM(adopt_model(family, tiny_model(family), None), **settings)


def use_of(llm):
    return MemoryUse.of(llm.space, llm.config)


def test_what_is_held_grows_with_what_is_read():
    llm = make_llm(num_slots=500, donor_tokens=10_000, host_bytes=1 << 20)
    before = use_of(llm)
    assert (before.kv_bytes, before.donor_tokens) == (0, 0)
    assert (before.host_limit_bytes, before.donor_tokens_limit) == (1 << 20, 10_000)
    llm.generate(np.arange(3, 103), SamplingParams(1))
    after = use_of(llm)
    per_token = llm.adapter.pool.bytes_per_token
    assert after.kv_limit_bytes == 500 * per_token
    assert 100 * per_token <= after.kv_bytes <= 101 * per_token
    assert after.donor_tokens >= 100


def test_prefixes_on_the_host_are_counted():
    llm = make_llm(num_slots=120, prefix_host_bytes=1 << 20, host_bytes=0)
    for start in (3, 103, 203):
        llm.generate(np.arange(start, start + 100), SamplingParams(1), reuse="exact")
    used, limit = use_of(llm).pools["host_prefixes"]
    assert limit == 1 << 20
    assert used == llm.space.prefix_host_tokens * llm.adapter.pool.bytes_per_token > 0


@pytest.mark.parametrize("family", ["gemma3_text"])
def test_models_with_windows_count_both_spaces(family):
    llm = make_llm(family, num_slots=400)
    llm.generate(np.arange(3, 60), SamplingParams(1))
    use = use_of(llm)
    assert use.kv_limit_bytes == llm.adapter.pool.num_bytes
    assert 0 < use.kv_bytes == llm.space.held_bytes <= use.kv_limit_bytes
