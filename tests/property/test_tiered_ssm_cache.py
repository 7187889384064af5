"""HierarchicalStateCache against a token-level oracle: a hypothesis state machine, and seeded walks with room and without."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from tests.support.ssm_machine import KINDS, BaseStateMachine
from tests.support.tiered_ssm_model import TieredStateModel
from tests.support.tiered_ssm_walk import random_tiered_walk

from kvgraft.prefix import EVICTION_POLICIES, WRITE_POLICIES

OPERATIONS_PER_WALK = 150
OPERATIONS_PER_LONG_WALK = 540
"""Times 2 pages, 2 chunks, 8 policies, 3 write policies and 2 hosts: 103,680 operations."""

SMALL = {"host_pages": 14, "host_states": 5}
"""A host that is full most of the time."""


class TieredMachine(BaseStateMachine):
    host: ClassVar[dict[str, Any]] = {}
    most_locks = 3

    def make_model(self) -> TieredStateModel:
        return TieredStateModel(self.page_size, self.chunk_size, self.policy, size=60 * self.page_size, **self.host)

    @rule(kinds=KINDS, tail=st.integers(0, 15))
    def load_back(self, kinds, tail):
        self.model.load_back(self.expand(kinds, tail))

    @precondition(lambda self: len(self.model.tickets) < 2)
    @rule(kinds=KINDS)
    def begin(self, kinds):
        self.model.begin(self.expand(kinds, 0))

    @precondition(lambda self: self.model.tickets)
    @rule(commit=st.booleans())
    def end(self, commit):
        self.model.end(commit=commit)

    @rule()
    def reset(self):
        self.model.reset()


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
