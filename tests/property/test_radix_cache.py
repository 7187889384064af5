"""RadixCache against a dict of token tuples: one entry per stored page, with its slots and the time of its last use."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.support.radix_walk import RadixModel

from kvgraft.errors import CorruptCacheError
from kvgraft.prefix import EVICTION_POLICIES, PrefixHandle, RadixCache, RadixKey

EXTRA_KEYS = (None, b"", b"tenant-a", "tenant-a", ("adapter", 1))

Prefix = tuple[object, tuple[int, ...]]
"""Namespace and the tokens of some whole pages."""


@dataclass
class Page:
    slots: tuple[int, ...]
    last_access: int
    hits: int = 1


@dataclass
class Lock:
    handle: PrefixHandle
    prefix: Prefix


class RadixCacheMachine(RuleBasedStateMachine):
    """Slots are numbered as they are handed in; each ends in the tree, with the caller, or freed."""

    page_size = 1

    def __init__(self) -> None:
        super().__init__()
        self.cache = RadixCache(self.page_size)
        self.pages: dict[Prefix, Page] = {}
        self.locks: list[Lock] = []
        self.now = 0
        self.next_slot = 0
        self.returned: set[int] = set()
        self.freed: set[int] = set()

    @initialize(tail=st.integers(0, 20))
    def start_with_one_prompt(self, tail):
        """Without this many runs would look up in an empty tree."""
        self.insert((0, 1, 0, 2), tail, None, lock=False, reuse=False)

    # what the oracle knows

    def expand(self, page_kinds, tail) -> tuple[int, ...]:
        """Tokens of pages that differ early, late or not at all, and a tail shorter than a page."""
        size = self.page_size
        kinds = ([1] * size, [2] * size, [1] * (size - 1) + [3])
        return tuple(token for kind in page_kinds for token in kinds[kind]) + (1,) * (tail % size)

    def prefixes(self, tokens, extra_key) -> list[Prefix]:
        """Every whole-page prefix, the shortest first."""
        ends = range(self.page_size, len(tokens) + 1, self.page_size)
        return [(extra_key, tokens[:end]) for end in ends]

    def touch(self, tokens, extra_key) -> list[Prefix]:
        """The stored prefixes of a key, marked as used now."""
        self.now += 1
        stored = [prefix for prefix in self.prefixes(tokens, extra_key) if prefix in self.pages]
        for prefix in stored:
            self.pages[prefix].last_access = self.now
        return stored

    def slots_of(self, prefixes) -> list[int]:
        return [slot for prefix in prefixes for slot in self.pages[prefix].slots]

    def protected(self) -> set[Prefix]:
        return {prefix for lock in self.locks for prefix in self.prefixes(lock.prefix[1], lock.prefix[0])}

    def leaf_pages(self) -> list[Page]:
        """Pages that no lock protects and no page continues."""
        parents = {(extra_key, tokens[: -self.page_size]) for extra_key, tokens in self.pages}
        free = self.pages.keys() - parents - self.protected()
        return [self.pages[prefix] for prefix in free]

    # rules

    @rule(
        page_kinds=st.lists(st.integers(0, 2), max_size=6),
        tail=st.integers(0, 20),
        extra_key=st.sampled_from(EXTRA_KEYS),
        lock=st.booleans(),
    )
    def match_prefix(self, page_kinds, tail, extra_key, lock):
        tokens = self.expand(page_kinds, tail)
        result = self.cache.match_prefix(RadixKey(np.array(tokens, dtype=np.int64), extra_key))
        stored = self.touch(tokens, extra_key)
        assert result.prefix_len == len(stored) * self.page_size
        assert result.kv_indices.tolist() == self.slots_of(stored)
        self.maybe_lock(lock, result.handle, (extra_key, tokens[: result.prefix_len]))

    @rule(
        page_kinds=st.lists(st.integers(0, 2), max_size=6),
        tail=st.integers(0, 20),
        extra_key=st.sampled_from(EXTRA_KEYS),
        lock=st.booleans(),
        reuse=st.booleans(),
    )
    def insert(self, page_kinds, tail, extra_key, lock, reuse):
        """Insert with slots of its own, or like a request that runs on the cache's slots where it matched."""
        self.store(self.expand(page_kinds, tail), extra_key, None, lock=lock, reuse=reuse)

    @precondition(lambda self: self.locks)
    @rule(
        data=st.data(), page_kinds=st.lists(st.integers(0, 2), max_size=4), tail=st.integers(0, 20), lock=st.booleans()
    )
    def insert_behind(self, data, page_kinds, tail, lock):
        """Continue a locked prefix; in front of the handle no hit is counted, all else is as for a plain insert."""
        after = data.draw(st.sampled_from(self.locks))
        extra_key, tokens = after.prefix
        self.store(tokens + self.expand(page_kinds, tail), extra_key, after, lock=lock, reuse=True)

    def store(self, tokens, extra_key, after, *, lock, reuse):
        stored = self.touch(tokens, extra_key)
        prefix_len = len(stored) * self.page_size
        for prefix in stored:
            self.pages[prefix].hits += after is None or len(prefix[1]) > len(after.prefix[1])
        slots = np.arange(self.next_slot, self.next_slot + len(tokens))
        self.next_slot += len(tokens)
        offered = slots.copy()
        if reuse:
            offered[:prefix_len] = self.slots_of(stored)
        key = RadixKey(np.array(tokens, dtype=np.int64), extra_key)
        result = self.cache.insert(key, offered, after=None if after is None else after.handle)
        total_len = len(tokens) - len(tokens) % self.page_size
        assert (result.prefix_len, result.total_len) == (prefix_len, total_len)
        for prefix in self.prefixes(tokens, extra_key)[len(stored) :]:
            end = len(prefix[1])
            self.pages[prefix] = Page(tuple(slots[end - self.page_size : end].tolist()), self.now)
        self.returned.update(slots[:prefix_len].tolist(), slots[total_len:].tolist())
        self.maybe_lock(lock, result.handle, (extra_key, tokens[:total_len]))

    def maybe_lock(self, lock, handle, prefix):
        if lock:
            self.cache.inc_lock_ref(handle)
            self.locks.append(Lock(handle, prefix))

    @precondition(lambda self: self.locks)
    @rule(data=st.data())
    def lock_again(self, data):
        lock = data.draw(st.sampled_from(self.locks))
        self.cache.inc_lock_ref(lock.handle)
        self.locks.append(lock)

    @precondition(lambda self: self.locks)
    @rule(data=st.data())
    def unlock(self, data):
        lock = self.locks.pop(data.draw(st.integers(0, len(self.locks) - 1)))
        self.cache.dec_lock_ref(lock.handle)

    @rule(num_tokens=st.integers(-1, 40))
    def evict(self, num_tokens):
        protected = self.protected()
        freed = self.cache.evict(num_tokens).freed.tolist()
        dropped = self.forget(freed)
        evictable = (len(self.pages) + len(dropped) - len(protected)) * self.page_size
        assert len(freed) >= min(num_tokens, evictable)
        if dropped:
            last = max(page.last_access for page in dropped)
            early = [page for page in dropped if page.last_access < last]
            assert len(early) * self.page_size < num_tokens, "dropped more than was asked for"
            assert all(page.last_access >= last for page in self.leaf_pages()), "dropped the wrong ones"
        assert protected <= self.pages.keys()

    def forget(self, freed) -> list[Page]:
        """Drop the pages of these slots from the oracle; what is left must be closed under prefixes."""
        assert len(set(freed)) == len(freed)
        gone = [prefix for prefix, page in self.pages.items() if page.slots[0] in set(freed)]
        assert sorted(self.slots_of(gone)) == sorted(freed)
        dropped = [self.pages.pop(prefix) for prefix in gone]
        for extra_key, tokens in self.pages:
            parent = tokens[: -self.page_size]
            assert not parent or (extra_key, parent) in self.pages
        self.freed.update(freed)
        return dropped

    @precondition(lambda self: self.now % 7 == 6)
    @rule()
    def reset(self):
        stale = self.locks
        self.locks = []
        self.forget(self.cache.reset().tolist())
        assert not self.pages
        for lock in stale:
            if lock.prefix[1]:
                with pytest.raises(CorruptCacheError):
                    self.cache.dec_lock_ref(lock.handle)

    # after each rule

    @invariant()
    def sound(self):
        self.cache.check()

    @invariant()
    def sizes_agree(self):
        protected_size = len(self.protected()) * self.page_size
        assert self.cache.protected_size == protected_size
        assert self.cache.total_size == len(self.pages) * self.page_size
        assert self.cache.evictable_size == self.cache.total_size - protected_size

    @invariant()
    def hits_agree(self):
        expected = {slot: page.hits for page in self.pages.values() for slot in page.slots}
        found = {slot: node.hit_count for node in self.cache.root_handle.subtree() for slot in node.kv_indices.tolist()}
        assert found == expected

    @invariant()
    def slots_are_conserved(self):
        """Every slot that was handed in is in exactly one place."""
        stored = self.slots_of(self.pages)
        everywhere = [*stored, *self.returned, *self.freed]
        assert sorted(everywhere) == list(range(self.next_slot))


def machine(page_size):
    """A test case for one page size."""
    subclass = type(f"RadixCacheMachine{page_size}", (RadixCacheMachine,), {"page_size": page_size})
    subclass.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
    return subclass.TestCase


TestPageSize1 = machine(1)
TestPageSize2 = machine(2)
TestPageSize4 = machine(4)
TestPageSize16 = machine(16)


@pytest.mark.parametrize("policy", sorted(EVICTION_POLICIES))
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_long_walk_agrees_with_the_oracle_under_every_policy(policy, page_size):
    model = RadixModel(page_size, page_size, policy)
    for _ in range(600):
        model.step()
