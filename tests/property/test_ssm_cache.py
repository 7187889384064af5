"""StateRadixCache against a token-level oracle: a hypothesis state machine, and seeded walks over pages, chunks, policies."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from tests.support.ssm_machine import KINDS, POSITIONS, BaseStateMachine
from tests.support.ssm_model import StateModel
from tests.support.ssm_walk import random_walk

from kvgraft.prefix import EVICTION_POLICIES

PAGES = (1, 2, 4, 16)
CHUNKS = (1, 2, 3, 8)
OPERATIONS_PER_WALK = 100
OPERATIONS_PER_LONG_WALK = 800
"""Times 4 pages, 4 chunks and 8 policies: 102,400 operations."""


class StateMachine(BaseStateMachine):
    def make_model(self) -> StateModel:
        return StateModel(self.page_size, self.chunk_size, self.policy)

    @precondition(lambda self: self.model.locks)
    @rule(data=st.data(), kinds=KINDS, positions=POSITIONS)
    def insert_behind_a_lock(self, data, kinds, positions):
        held = data.draw(st.sampled_from(self.model.locks))
        begin = len(held.tokens)
        self.model.insert(
            self.expand(kinds, 0), {begin + position for position in self.spread(positions)} | {begin}, held
        )


def machine(page_size, chunk_size, policy):
    name = f"StateMachine{page_size}Chunk{chunk_size}{policy}"
    fields = {"page_size": page_size, "chunk_size": chunk_size, "policy": policy}
    subclass = type(name, (StateMachine,), fields)
    subclass.TestCase.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
    return subclass.TestCase


TestPage1 = machine(1, 1, "lru")
TestPage2Chunk3 = machine(2, 3, "lru")
TestPage4Chunk8Slru = machine(4, 8, "slru")
TestPage1Chunk2Lfu = machine(1, 2, "lfu")
TestPage16Tlru = machine(16, 1, "tlru")


@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize("chunk_size", CHUNKS)
def test_a_walk_agrees_with_the_oracle(page_size, chunk_size):
    for seed, policy in enumerate(sorted(EVICTION_POLICIES)):
        model = random_walk(seed, OPERATIONS_PER_WALK, page_size, chunk_size, policy)
        assert model.num_matches > OPERATIONS_PER_WALK // 6


@pytest.mark.slow
@pytest.mark.parametrize("policy", sorted(EVICTION_POLICIES))
@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize("chunk_size", CHUNKS)
def test_a_long_walk_agrees_with_the_oracle(page_size, chunk_size, policy):
    model = random_walk(chunk_size * 31 + page_size, OPERATIONS_PER_LONG_WALK, page_size, chunk_size, policy)
    assert model.num_matches > OPERATIONS_PER_LONG_WALK // 6
    assert policy == "tlru" or model.num_evicted_alone > 0
