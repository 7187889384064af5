"""HostKVStore against a dict of plain lists."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvgraft.errors import CapacityError, ConfigError, StoreError
from kvgraft.memory import HostKVStore, KVBlock

BYTES_PER_TOKEN = 2 * 2 * (1 * 2) * 4
"""Keys and values, two layers, one head of two float32."""
BUDGET_BYTES = 60 * BYTES_PER_TOKEN

store_keys = st.one_of(st.integers(0, 3), st.sampled_from(["a", b"a"]))


class HostKVStoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = HostKVStore(BUDGET_BYTES)
        self.kept: dict[object, int] = {}
        self.lengths: dict[object, int] = {}
        self.serial = 0

    def make_block(self, num_tokens, *, as_view) -> KVBlock:
        """A block whose numbers tell serial, layer, keys or values, and token; as a view of a longer one if asked."""
        extra = 3 if as_view else 0
        token = torch.arange(num_tokens + extra, dtype=torch.float32)[:, None, None]
        parts = [(token - extra + 1_000 * (4 * self.serial + part)).repeat(1, 1, 2) for part in range(4)]
        return KVBlock(tuple(parts[:2]), tuple(parts[2:])).span(extra, num_tokens)

    def expected(self, key, start, length):
        first = [1_000.0 * (4 * self.kept[key] + part) + start for part in range(4)]
        return [[value + token for token in range(length)] for value in first]

    def used_bytes(self) -> int:
        return sum(self.lengths.values()) * BYTES_PER_TOKEN

    @rule(key=store_keys, num_tokens=st.integers(0, 40), as_view=st.booleans())
    def put(self, key, num_tokens, as_view):
        self.serial += 1
        block = self.make_block(num_tokens, as_view=as_view)
        fits = self.used_bytes() + block.num_bytes <= BUDGET_BYTES
        assert self.store.fits(block.num_bytes) == fits
        if key in self.kept or not fits:
            with pytest.raises(StoreError if key in self.kept else CapacityError):
                self.store.put(key, block)
            return
        self.store.put(key, block)
        self.kept[key] = self.serial
        self.lengths[key] = num_tokens

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def get(self, data):
        key = data.draw(st.sampled_from(list(self.kept)))
        start = data.draw(st.integers(0, self.lengths[key]))
        length = data.draw(st.none() | st.integers(0, self.lengths[key] - start))
        block = self.store.get(key, start, length)
        length = self.lengths[key] - start if length is None else length
        assert [part[:, 0, 1].tolist() for part in (*block.keys, *block.values)] == self.expected(key, start, length)

    @precondition(lambda self: self.kept)
    @rule(data=st.data(), beyond=st.integers(1, 3))
    def get_beyond_the_end(self, data, beyond):
        key = data.draw(st.sampled_from(list(self.kept)))
        with pytest.raises(ConfigError):
            self.store.get(key, 0, self.lengths[key] + beyond)

    @rule(key=store_keys)
    def remove(self, key):
        if key not in self.kept:
            with pytest.raises(StoreError):
                self.store.remove(key)
            with pytest.raises(StoreError):
                self.store.get(key)
            return
        self.store.remove(key)
        del self.kept[key], self.lengths[key]

    @invariant()
    def sound(self):
        self.store.check()
        assert self.store.used_bytes == self.used_bytes()
        assert len(self.store) == len(self.kept)

    @invariant()
    def holds_exactly_what_was_put(self):
        for key in (0, 1, 2, 3, "a", b"a"):
            assert (key in self.store) == (key in self.kept)


HostKVStoreMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestHostKVStore = HostKVStoreMachine.TestCase
