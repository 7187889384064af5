"""SWARadixCache against a token-level oracle: a hypothesis state machine, and a long seeded walk over pages and windows."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.support.swa_model import SWAModel
from tests.support.swa_walk import random_walk

from kvgraft.windows import ChunkedWindow, SlidingWindow

PAGES = (1, 2, 4, 16)
WINDOWS = (1, 2, 3, 5, 8, 16, 33, 64)
OPERATIONS_PER_WALK = 800
"""Times 4 pages, 8 windows, 2 kinds and 2 leaf caps: 102,400 operations."""


class SWAMachine(RuleBasedStateMachine):
    page_size = 1
    window = SlidingWindow(4)
    leaf_cap = False

    def __init__(self) -> None:
        super().__init__()
        self.model = SWAModel(self.page_size, self.window, leaf_cap=self.leaf_cap)

    def expand(self, kinds, tail):
        size = self.page_size
        pages = ((1,) * size, (2,) * size, (1,) * (size - 1) + (3,))
        return tuple(token for kind in kinds for token in pages[kind]) + (1,) * (tail % size)

    kinds = st.lists(st.integers(0, 2), max_size=9)

    @rule(kinds=kinds, tail=st.integers(0, 15), lock=st.booleans())
    def match(self, kinds, tail, lock):
        self.model.match(self.expand(kinds, tail), lock=lock and len(self.model.locks) < 4)

    @rule(kinds=kinds, tail=st.integers(0, 15), evicted=st.integers(0, 160), lock=st.booleans())
    def insert(self, kinds, tail, evicted, lock):
        self.model.insert(self.expand(kinds, tail), evicted, lock=lock and len(self.model.locks) < 4)

    @precondition(lambda self: self.model.locks)
    @rule(data=st.data(), kinds=kinds, evicted=st.integers(0, 200))
    def insert_behind_a_lock(self, data, kinds, evicted):
        self.model.insert(self.expand(kinds, 0), evicted, data.draw(st.sampled_from(self.model.locks)))

    @rule(num_tokens=st.integers(0, 40), swa_num_tokens=st.integers(0, 60))
    def evict(self, num_tokens, swa_num_tokens):
        self.model.evict(num_tokens, swa_num_tokens)

    @precondition(lambda self: self.model.locks)
    @rule(data=st.data())
    def unlock(self, data):
        self.model.unlock(data.draw(st.sampled_from(self.model.locks)))

    @precondition(lambda self: any(not held.swa_released for held in self.model.locks))
    @rule(data=st.data())
    def release_window(self, data):
        self.model.release_window(data.draw(st.sampled_from([h for h in self.model.locks if not h.swa_released])))

    @invariant()
    def agrees(self):
        self.model.check()


def machine(page_size, window, leaf_cap):
    name = f"SWAMachine{page_size}{type(window).__name__}{window.size}"
    fields = {"page_size": page_size, "window": window, "leaf_cap": leaf_cap}
    subclass = type(name, (SWAMachine,), fields)
    subclass.TestCase.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
    return subclass.TestCase


TestPage1Window4 = machine(1, SlidingWindow(4), leaf_cap=False)
TestPage2Window3Capped = machine(2, SlidingWindow(3), leaf_cap=True)
TestPage4Window9 = machine(4, SlidingWindow(9), leaf_cap=False)
TestPage16Window64Capped = machine(16, SlidingWindow(64), leaf_cap=True)
TestPage1Chunk4 = machine(1, ChunkedWindow(4), leaf_cap=False)
TestPage2Chunk3Capped = machine(2, ChunkedWindow(3), leaf_cap=True)
TestPage4Chunk6 = machine(4, ChunkedWindow(6), leaf_cap=False)
TestPage4Chunk8Capped = machine(4, ChunkedWindow(8), leaf_cap=True)
TestPage16Chunk32 = machine(16, ChunkedWindow(32), leaf_cap=False)


@pytest.mark.slow
@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize("size", WINDOWS)
@pytest.mark.parametrize("kind", [SlidingWindow, ChunkedWindow])
def test_a_long_walk_agrees_with_the_oracle(page_size, size, kind):
    for leaf_cap in (False, True):
        model = random_walk(size * 31 + page_size, OPERATIONS_PER_WALK, page_size, kind(size), leaf_cap=leaf_cap)
        assert model.num_matches > OPERATIONS_PER_WALK // 5
