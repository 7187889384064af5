"""HierarchicalStateCache against a token-level oracle: a hypothesis state machine, and seeded walks with room and without."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.support.tiered_ssm_model import TieredStateModel
from tests.support.tiered_ssm_walk import random_tiered_walk

from kvgraft.prefix import EVICTION_POLICIES, WRITE_POLICIES

OPERATIONS_PER_WALK = 150
OPERATIONS_PER_LONG_WALK = 540
"""Times 2 pages, 2 chunks, 8 policies, 3 write policies and 2 hosts: 103,680 operations."""

SMALL = {"host_pages": 14, "host_states": 5}
"""A host that is full most of the time."""


class TieredMachine(RuleBasedStateMachine):
    page_size = 1
    chunk_size = 1
    policy = "lru"
    host: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.model = TieredStateModel(
            self.page_size, self.chunk_size, self.policy, size=60 * self.page_size, **self.host
        )

    def expand(self, kinds, tail):
        size = self.page_size
        pages = ((1,) * size, (2,) * size, (1,) * (size - 1) + (3,))
        return tuple(token for kind in kinds for token in pages[kind]) + (1,) * (tail % size)

    def spread(self, positions):
        """Small numbers count chunks, others tokens."""
        return {position * self.model.alignment if position < 10 else position - 10 for position in positions}

    kinds = st.lists(st.integers(0, 2), max_size=9)
    positions = st.sets(st.integers(1, 60), max_size=3)

    @rule(kinds=kinds, tail=st.integers(0, 15), lock=st.booleans())
    def match(self, kinds, tail, lock):
        self.model.match(self.expand(kinds, tail), lock=lock and len(self.model.locks) < 3)

    @rule(kinds=kinds, tail=st.integers(0, 15), positions=positions, priority=st.integers(0, 2), lock=st.booleans())
    def insert(self, kinds, tail, positions, priority, lock):
        lock = lock and len(self.model.locks) < 3
        self.model.insert(self.expand(kinds, tail), self.spread(positions), priority=priority, lock=lock)

    @rule(num_tokens=st.integers(0, 40), num_states=st.integers(0, 4), at_once=st.booleans())
    def evict(self, num_tokens, num_states, at_once):
        (self.model.evict_at_once if at_once else self.model.evict)(num_tokens, num_states)

    @rule(kinds=kinds, tail=st.integers(0, 15))
    def load_back(self, kinds, tail):
        self.model.load_back(self.expand(kinds, tail))

    @precondition(lambda self: len(self.model.tickets) < 2)
    @rule(kinds=kinds)
    def begin(self, kinds):
        self.model.begin(self.expand(kinds, 0))

    @precondition(lambda self: self.model.tickets)
    @rule(commit=st.booleans())
    def end(self, commit):
        self.model.end(commit=commit)

    @precondition(lambda self: self.model.locks)
    @rule(data=st.data())
    def unlock(self, data):
        self.model.unlock(data.draw(st.sampled_from(self.model.locks)))

    @precondition(lambda self: any(held.holds_state for held in self.model.locks))
    @rule(data=st.data())
    def release_state(self, data):
        self.model.release_state(data.draw(st.sampled_from([h for h in self.model.locks if h.holds_state])))

    @rule()
    def reset(self):
        self.model.reset()

    @invariant()
    def agrees(self):
        self.model.check()


def machine(page_size, chunk_size, policy, host):
    fields = {"page_size": page_size, "chunk_size": chunk_size, "policy": policy, "host": host}
    subclass = type(f"TieredMachine{page_size}Chunk{chunk_size}{policy}{len(host)}", (TieredMachine,), fields)
    subclass.TestCase.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)
    return subclass.TestCase


TestPage1 = machine(1, 1, "lru", {})
TestPage1SmallHost = machine(1, 1, "lru", SMALL)
TestPage2Chunk3SmallHost = machine(2, 3, "lru", SMALL)
TestPage4SlruSmallHost = machine(4, 1, "slru", SMALL)


@pytest.mark.parametrize("write_policy", sorted(WRITE_POLICIES))
@pytest.mark.parametrize("host", [{}, SMALL], ids=["ample", "small"])
@pytest.mark.parametrize("failure_rate", [0.0, 0.2])
def test_a_walk_agrees_with_the_oracle(write_policy, host, failure_rate, caplog):
    caplog.set_level("CRITICAL")
    num_loaded = 0
    for seed, (page_size, chunk_size, policy) in enumerate([(1, 1, "lru"), (2, 3, "lru"), (4, 2, "priority")]):
        model = random_tiered_walk(
            seed,
            OPERATIONS_PER_WALK,
            page_size,
            chunk_size,
            policy,
            write_policy=write_policy,
            failure_rate=failure_rate,
            **host,
        )
        num_loaded += model.num_loaded
    assert num_loaded > 10


@pytest.mark.slow
@pytest.mark.parametrize("policy", sorted(EVICTION_POLICIES))
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("chunk_size", [1, 3])
@pytest.mark.parametrize("write_policy", sorted(WRITE_POLICIES))
@pytest.mark.parametrize("host", [{}, SMALL], ids=["ample", "small"])
def test_a_long_walk_agrees_with_the_oracle(host, write_policy, chunk_size, page_size, policy):
    model = random_tiered_walk(
        chunk_size * 31 + page_size,
        OPERATIONS_PER_LONG_WALK,
        page_size,
        chunk_size,
        policy,
        write_policy=write_policy,
        **host,
    )
    assert model.num_loaded > (2 if host else 50)
    assert not host or model.num_host_evictions > 10
