"""What state machines of trees with states ask, in one tier or in two."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

if TYPE_CHECKING:
    from tests.support.ssm_model import StateModel

KINDS = st.lists(st.integers(0, 2), max_size=9)
"""Pages of a text, of three kinds that begin alike."""
POSITIONS = st.sets(st.integers(1, 60), max_size=3)


class BaseStateMachine(RuleBasedStateMachine):
    page_size = 1
    chunk_size = 1
    policy = "lru"
    most_locks = 4

    def __init__(self) -> None:
        super().__init__()
        self.model = self.make_model()

    @abstractmethod
    def make_model(self) -> StateModel:
        """The cache and its oracle, empty."""

    def expand(self, kinds, tail):
        size = self.page_size
        pages = ((1,) * size, (2,) * size, (1,) * (size - 1) + (3,))
        return tuple(token for kind in kinds for token in pages[kind]) + (1,) * (tail % size)

    def spread(self, positions):
        """Small numbers count chunks, others tokens."""
        return {position * self.model.alignment if position < 10 else position - 10 for position in positions}

    def may_lock(self, lock):
        return lock and len(self.model.locks) < self.most_locks

    @rule(kinds=KINDS, tail=st.integers(0, 15), lock=st.booleans())
    def match(self, kinds, tail, lock):
        self.model.match(self.expand(kinds, tail), lock=self.may_lock(lock))

    @rule(kinds=KINDS, tail=st.integers(0, 15), positions=POSITIONS, priority=st.integers(0, 2), lock=st.booleans())
    def insert(self, kinds, tail, positions, priority, lock):
        tokens, lock = self.expand(kinds, tail), self.may_lock(lock)
        self.model.insert(tokens, self.spread(positions), priority=priority, lock=lock)

    @rule(num_tokens=st.integers(0, 40), num_states=st.integers(0, 4), at_once=st.booleans())
    def evict(self, num_tokens, num_states, at_once):
        (self.model.evict_at_once if at_once else self.model.evict)(num_tokens, num_states)

    @precondition(lambda self: self.model.locks)
    @rule(data=st.data())
    def unlock(self, data):
        self.model.unlock(data.draw(st.sampled_from(self.model.locks)))

    @precondition(lambda self: any(held.holds_state for held in self.model.locks))
    @rule(data=st.data())
    def release_state(self, data):
        self.model.release_state(data.draw(st.sampled_from([h for h in self.model.locks if h.holds_state])))

    @invariant()
    def agrees(self):
        self.model.check()
