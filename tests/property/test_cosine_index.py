"""CosineIndex against a plain dict: what is stored, in which order it would leave, and what a search gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvgraft.semantic import CosineIndex, unit_rows

CAPACITY, DIMENSIONS = 8, 3
DIRECTIONS = unit_rows(np.random.default_rng(0).normal(size=(40, DIMENSIONS)).astype(np.float32))
"""No two are equally far from a third, so the order of answers is known."""

namespaces, keys, directions = st.sampled_from("ab"), st.integers(0, 5), st.integers(0, len(DIRECTIONS) - 1)


class CosineIndexMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.index = CosineIndex(DIMENSIONS, CAPACITY)
        self.stored = {}
        """Direction by namespace and key; oldest first."""

    @rule(namespace=namespaces, key=keys, direction=directions)
    def add(self, namespace, key, direction):
        self.stored.pop((namespace, key), None)
        self.stored[namespace, key] = direction
        expected = []
        if len(self.stored) > CAPACITY:
            expected.append(next(iter(self.stored)))
            del self.stored[expected[0]]
        assert self.index.add(namespace, key, DIRECTIONS[direction]) == expected

    @rule(namespace=namespaces, key=keys)
    def remove(self, namespace, key):
        assert self.index.remove(namespace, key) == (self.stored.pop((namespace, key), None) is not None)

    @rule(namespace=namespaces, direction=directions, k=st.integers(0, 6), least=st.sampled_from([-1.0, 0.0, 0.7]))
    def search(self, namespace, direction, k, least):
        cosines = {
            key: float(DIRECTIONS[each] @ DIRECTIONS[direction])
            for (owner, key), each in self.stored.items()
            if owner == namespace
        }
        best = [cosine for cosine in sorted(cosines.values(), reverse=True)[:k] if cosine >= least]
        found = self.index.search(namespace, DIRECTIONS[direction], k, least)
        assert [each.similarity for each in found] == pytest.approx(best, abs=1e-6)
        for each in reversed(found):
            assert each.similarity == pytest.approx(cosines[each.key], abs=1e-6)
            self.stored[namespace, each.key] = self.stored.pop((namespace, each.key))
        assert len({each.key for each in found}) == len(found)

    @rule()
    def clear(self):
        self.index.clear()
        self.stored.clear()

    @invariant()
    def holds_the_same(self):
        self.index.check()
        assert len(self.index) == len(self.stored)
        assert all(entry in self.index for entry in self.stored)


CosineIndexMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCosineIndex = CosineIndexMachine.TestCase
