"""`check` notices every disagreement about who holds what, and says so with the error that it documents."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvgraft.engine import LLM, SamplingParams
from kvgraft.engine.model.loading import adopt_model
from kvgraft.errors import CorruptCacheError
from kvgraft.memory import KVBlock, Owner
from kvgraft.testing.tiny_models import VOCABULARY, tiny_model


def hold_as_cached(space):
    slots = space.allocator.allocate(3)
    space.allocator.retain(slots, Owner.CACHE)


def hold_as_donor(space):
    slots = space.allocator.allocate(3)
    space.allocator.retain(slots, Owner.DONOR)


def forget_a_prefix(space):
    space.prefix.reset()


def leave_a_block_on_the_host(space):
    block = next(iter(space.donors))
    keys = tuple(torch.zeros(1, layer.num_kv_heads, layer.head_dim) for layer in space.pool.layers)
    space.host.put(f"stray beside {block.donor_id}", KVBlock(keys, keys))


def forget_a_donor(space):
    space.donors.remove(next(iter(space.donors)).donor_id)


DAMAGES = [hold_as_cached, hold_as_donor, forget_a_prefix, leave_a_block_on_the_host, forget_a_donor]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
def test_check_notices_damage(family, damage, rng):
    llm = LLM(adopt_model(family, tiny_model(family), None), num_slots=500)
    llm.generate(rng.integers(3, VOCABULARY, 100), SamplingParams(3))
    llm.check()
    damage(llm.space)
    with pytest.raises(CorruptCacheError):
        llm.check()


def test_a_donor_in_use_outlives_those_that_nobody_uses_without_host_memory(rng):
    llm = LLM(adopt_model("llama", tiny_model("llama"), None), num_slots=640, host_bytes=0, selection="none")
    hot, *cold = rng.integers(3, VOCABULARY, (4, 100))
    for text in (hot, *cold):
        llm.generate(text, SamplingParams(1))

    def asked():
        prompt = np.concatenate([rng.integers(3, VOCABULARY, 20), hot, rng.integers(3, VOCABULARY, 10)])
        return llm.generate(prompt, SamplingParams(1))[0].report.shifted_tokens

    assert asked() > 90
    llm.generate(rng.integers(3, VOCABULARY, 300), SamplingParams(1))
    assert llm.space.num_dropped > 0, "room was needed"
    assert asked() > 90, "its prefix is the oldest, its last use the youngest"
    llm.check()


def test_window_slots_that_nobody_knows_are_noticed(rng):
    llm = LLM(adopt_model("gemma2", tiny_model("gemma2"), None), num_slots=500)
    slots = llm.space.layers.allocator.allocate(3)
    llm.space.layers.allocator.retain(slots, Owner.CACHE)
    with pytest.raises(CorruptCacheError):
        llm.check()
