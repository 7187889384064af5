"""A prefix cache with states next to a token-level oracle: every operation goes to both, and they must agree.

The oracle keeps one entry per stored page and one per state, and knows no nodes, splits, queues or lock counts. It says which
states leave, under every policy that looks at times, hits and priorities, and under LRU which leaves. It drives property
tests; a failed comparison is an `AssertionError`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING, Any

import numpy as np

from kvgraft.prefix import RadixKey, StateRadixCache
from kvgraft.testing.slots import CheckedSlots

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvgraft.prefix import EvictResult, SlotArray, StateLock, StateMatchResult, StoredLength

Tokens = tuple[int, ...]

FIRST_STATE = 10_000_000
"""Number of the first slot of the pool of states."""

_UNREADABLE = -7
"""Slot offered where the cache must not read."""


@dataclass
class Page:
    """Slots of one stored page, and when a use of it or of something after it was last."""

    slots: tuple[int, ...]
    used: int


@dataclass
class Recorded:
    """A state: its slot, and the facts that policies look at."""

    slot: int
    last_access: int
    created: int
    priority: int
    hit_count: int = 1
    reach: int = 0
    start: int = 0


@dataclass
class HeldLock:
    """A receipt, the prefix that it locks, and whether it holds the state there."""

    receipt: StateLock
    tokens: Tokens
    holds_state: bool


class StateModel:
    """A cache, pools that own its slots, and the oracle.

    Attributes:
        cache: The cache under test.
        locks: Receipts that are held.
        num_matches: Lookups compared so far.
        num_evicted_alone: States that left without their tokens.
    """

    def __init__(self, page_size: int, chunk_size: int, policy: str = "lru", *, size: int = 4096) -> None:
        self.cache = self._make_cache(page_size, chunk_size, policy)
        self.locks: list[HeldLock] = []
        self.num_matches = self.num_evicted_alone = 0
        self.alignment = lcm(page_size, chunk_size)
        self._policy: Any = self.cache.policy
        self._page_size = page_size
        self._slots = CheckedSlots(size)
        self._state_slots = CheckedSlots(size, first=FIRST_STATE)
        self._pages: dict[Tokens, Page] = {}
        self._states: dict[Tokens, Recorded] = {}
        self._knows_leaves = policy == "lru"
        self._knows_states = policy != "tlru"  # which looks at where a node begins
        self._now = 0

    def _make_cache(self, page_size: int, chunk_size: int, policy: str) -> StateRadixCache:
        return StateRadixCache(page_size, state_chunk_size=chunk_size, policy=policy)

    # operations

    def match(self, tokens: Tokens, *, lock: bool = False) -> int:
        """Look up, compare with the oracle, perhaps lock; returns the length."""
        key = key_of(tokens)
        looked = self.cache.look(key)
        result = self.cache.match_prefix(key)
        self.num_matches += 1
        self._now += 1
        expected = self._compare(tokens, looked, result)
        if lock:
            receipt = self.cache.inc_lock_ref(result.handle)
            if expected:
                self._states[expected].hit_count += 1
            self.locks.append(HeldLock(receipt, expected, bool(expected)))
        return len(expected)

    def _compare(self, tokens: Tokens, looked: StoredLength, result: StateMatchResult) -> Tokens:
        """Compare a lookup with the oracle; returns what must have matched, which is used now."""
        stored = self._stored(tokens)
        expected = max((prefix for prefix in stored if prefix in self._states), key=len, default=())
        assert result.prefix_len == looked.prefix_len == len(expected), (
            f"matched {result.prefix_len}, looked up {looked.prefix_len} tokens, the oracle {len(expected)}"
        )
        reached = len(stored) * self._page_size
        assert result.branching_len == reached // self.alignment * self.alignment
        pages = [self._pages[prefix] for prefix in self._prefixes(expected)]
        assert result.kv_indices.tolist() == [slot for page in pages for slot in page.slots]
        if expected:
            assert result.state == self._states[expected].slot
            self._states[expected].last_access = self._now
            self._use(expected)
        else:
            assert result.state is None
        return expected

    def insert(
        self,
        tokens: Tokens,
        positions: Iterable[int],
        held: HeldLock | None = None,
        *,
        priority: int = 0,
        lock: bool = False,
    ) -> None:
        """Store with a state at each position that is not below a held lock, after which the key goes on."""
        tokens = tokens if held is None else held.tokens + tokens
        start = 0 if held is None else len(held.tokens)
        offered = sorted({position for position in positions if max(start, 1) <= position <= len(tokens)})
        self._make_room(len(tokens), len(offered))
        slots = np.full(len(tokens), _UNREADABLE)
        slots[start:] = self._alloc(self._slots, len(tokens) - start)
        states = dict(zip(offered, self._alloc(self._state_slots, len(offered)).tolist(), strict=True))
        self._fill(tokens, slots, states, start)
        result = self.cache.insert(
            key_of(tokens),
            slots,
            after=None if held is None else held.receipt,
            priority=priority,
            states=states,
        )
        prefix_len, total_len, returned = self._apply_insert(tokens, slots, states, start, priority)
        assert (result.prefix_len, result.total_len) == (prefix_len, total_len)
        assert sorted(result.state_freed.tolist()) == sorted(returned)
        self._slots.free(slots[start:prefix_len])
        self._slots.free(slots[total_len:])
        self._state_slots.free(result.state_freed)
        if lock:
            prefix = tokens[:total_len]
            self.locks.append(HeldLock(self.cache.lock_inserted(result.handle), prefix, prefix in self._states))

    def evict(self, num_tokens: int, num_states: int) -> None:
        """Evict tokens, then states: what leaves must be what the oracle says, as far as it knows the order."""
        evictable = self.cache.evictable_size
        result = self.cache.evict(num_tokens)
        assert len(result.freed) >= min(num_tokens, evictable)
        expected = self._expected_leaves(num_tokens) if self._knows_leaves else self._parts_of(result)
        self._forget(result, expected)
        state_evictable = self.cache.state_evictable_size
        result = self.cache.evict(0, num_states)
        assert len(result.state_freed) >= min(num_states, state_evictable)
        self._forget(result, self._expected_states(num_states) if self._knows_states else self._parts_of(result))

    def evict_at_once(self, num_tokens: int, num_states: int) -> None:
        """The same in one call, where tokens that leave count their states."""
        if not self._knows_leaves:
            self.evict(num_tokens, num_states)
            return
        pages, states = self._expected_leaves(num_tokens)
        more_pages, more_states = self._expected_states(num_states - len(states), without=(pages, states))
        self._forget(self.cache.evict(num_tokens, num_states), (pages + more_pages, states + more_states))

    def unlock(self, held: HeldLock) -> None:
        """Give back a lock: what it alone kept without a state goes."""
        self.locks.remove(held)
        pages = [] if held.tokens in self._states else self._chain(held.tokens, set())
        self._forget(self.cache.dec_lock_ref(held.receipt), (pages, []))

    def release_state(self, held: HeldLock) -> None:
        """Give the state of a lock back early."""
        held.holds_state = False
        self.cache.dec_state_lock_only(held.receipt)

    def reset(self) -> None:
        """Forget everything on both sides; every slot must come back."""
        self.locks.clear()
        self._forget(self.cache.reset_both(), (list(self._pages), list(self._states)))
        assert self._slots.available == self._slots.size
        assert self._state_slots.available == self._state_slots.size

    # comparison

    def check(self) -> None:
        """Verify the cache's own invariants, its sizes and the conservation of slots in both pools."""
        cache = self.cache
        cache.check()
        stored = len(self._pages) * self._page_size
        assert (cache.total_size, cache.protected_size) == (stored, len(self._protected()) * self._page_size)
        held = self._held_states()
        assert held <= self._states.keys(), "a locked state was freed"
        assert (cache.state_total_size, cache.state_protected_size) == (len(self._states), len(held))
        assert self._slots.available + cache.total_size == self._slots.size
        assert self._state_slots.available + cache.state_total_size == self._state_slots.size
        for prefix in self._pages:
            assert len(prefix) == self._page_size or prefix[: -self._page_size] in self._pages, (
                "a prefix lost its beginning"
            )
        protected = self._protected()
        for prefix in self._leaves():
            assert prefix in self._states or prefix in protected, "a leaf without state and lock is left"

    def _apply_insert(
        self, tokens: Tokens, slots: SlotArray, states: dict[int, int], start: int, priority: int
    ) -> tuple[int, int, list[int]]:
        """Do the same to the oracle; returns what was stored before, what is now, and the states that it does not take."""
        self._now += 1
        fitting = [position for position in states if position % self.alignment == 0]
        total_len = max(fitting, default=start)
        prefix_len = max(self._num_on_device(tokens[:total_len]) * self._page_size, start)
        for prefix in self._prefixes(tokens[:total_len])[prefix_len // self._page_size :]:
            own = slots[len(prefix) - self._page_size : len(prefix)]
            self._pages[prefix] = self._new_page(prefix, tuple(own.tolist()))
        self._use(tokens[:total_len])
        returned = [states[position] for position in states if position not in fitting]
        for position in fitting:
            recorded = self._states.get(tokens[:position])
            if recorded is None:
                self._states[tokens[:position]] = self._new_state(tokens[:position], states[position], priority)
                continue
            returned.append(states[position])
            self._record_again(recorded, priority)
        return prefix_len, total_len, returned

    def _fill(self, tokens: Tokens, slots: SlotArray, states: dict[int, int], start: int) -> None:
        """Hear what was computed into slots that are about to be stored."""

    def _num_on_device(self, tokens: Tokens) -> int:
        return len(self._stored(tokens))

    def _new_page(self, prefix: Tokens, slots: tuple[int, ...]) -> Page:
        return Page(slots, self._now)

    def _new_state(self, prefix: Tokens, slot: int, priority: int) -> Recorded:
        return Recorded(slot, self._now, self._now, priority)

    def _record_again(self, recorded: Recorded, priority: int) -> None:
        recorded.last_access = self._now
        recorded.hit_count += 1
        recorded.priority = max(recorded.priority, priority)

    def _expected_leaves(self, num_tokens: int) -> tuple[list[Tokens], list[Tokens]]:
        """Pages and states that leave when so many tokens are asked for: leaves, the least recently used first."""
        pages: list[Tokens] = []
        states: list[Tokens] = []
        while len(pages) * self._page_size < num_tokens:
            leaves = [leaf for leaf in self._leaves(set(pages)) if leaf not in self._protected()]
            if not leaves:
                break
            leaf = min(leaves, key=lambda prefix: self._pages[prefix].used)
            states.append(leaf)
            pages += self._chain(leaf, set(pages))
        return pages, states

    def _expected_states(
        self,
        num_states: int,
        without: tuple[list[Tokens], list[Tokens]] = ((), ()),  # type: ignore[assignment]
    ) -> tuple[list[Tokens], list[Tokens]]:
        """Pages and states that leave when so many states are asked for."""
        gone, left = set(without[0]), set(without[1])
        pages: list[Tokens] = []
        states: list[Tokens] = []
        held = self._held_states()
        while len(states) < num_states:
            open_states = [prefix for prefix in self._states if prefix not in held | left]
            if not open_states:
                break
            first = min(open_states, key=lambda prefix: (self._policy(self._states[prefix]), len(prefix)))
            states.append(first)
            left.add(first)
            chain = self._chain(first, gone, left)
            pages += chain
            gone.update(chain)
            self.num_evicted_alone += not chain
        return pages, states

    def _chain(self, prefix: Tokens, gone: set[Tokens], left: set[Tokens] = frozenset()) -> list[Tokens]:  # type: ignore[assignment]
        """Pages that go with a prefix that has lost its state: nothing if something continues it or holds it."""
        chain: list[Tokens] = []
        protected = self._protected()
        while prefix and prefix not in protected and not self._is_continued(prefix, gone | set(chain)):
            if chain and prefix in self._states.keys() - left:
                break
            chain.append(prefix)
            prefix = prefix[: -self._page_size]
        return chain

    def _is_continued(self, prefix: Tokens, gone: set[Tokens]) -> bool:
        size = len(prefix) + self._page_size
        return any(len(page) == size and page[: len(prefix)] == prefix for page in self._pages.keys() - gone)

    def _leaves(self, gone: set[Tokens] = frozenset()) -> list[Tokens]:  # type: ignore[assignment]
        left = self._pages.keys() - gone
        continued = {page[: -self._page_size] for page in left}
        return [page for page in left if page not in continued]

    def _parts_of(self, result: EvictResult) -> tuple[list[Tokens], list[Tokens]]:
        """What a result names, where the oracle does not know the order."""
        freed, states = set(result.freed.tolist()), set(result.state_freed.tolist())
        return (
            [prefix for prefix, page in self._pages.items() if page.slots[0] in freed],
            [prefix for prefix, state in self._states.items() if state.slot in states],
        )

    def _forget(self, result: EvictResult, expected: tuple[list[Tokens], list[Tokens]]) -> None:
        """Take what must have left out of the oracle; the cache must have freed just that."""
        pages, states = expected
        assert not self._protected() & set(pages), "a locked prefix was freed"
        held = self._held_states()
        assert not held & set(states), "a locked state was freed"
        slots = [slot for prefix in pages for slot in self._pages.pop(prefix).slots]
        assert sorted(result.freed.tolist()) == sorted(slots)
        assert sorted(result.state_freed.tolist()) == sorted(self._states.pop(prefix).slot for prefix in states)
        self._slots.free(result.freed)
        self._state_slots.free(result.state_freed)
        assert not self._states.keys() - self._pages.keys(), "tokens left and their state stayed"

    def _make_room(self, num_tokens: int, num_states: int) -> None:
        short = max(num_tokens - self._slots.available, 0)
        short_states = max(num_states - self._state_slots.available, 0)
        if short or short_states:
            self.evict(short, short_states)

    def _use(self, tokens: Tokens) -> None:
        for prefix in self._prefixes(tokens):
            self._pages[prefix].used = self._now

    def _stored(self, tokens: Tokens) -> list[Tokens]:
        stored: list[Tokens] = []
        for prefix in self._prefixes(tokens):
            if prefix not in self._pages:
                break
            stored.append(prefix)
        return stored

    def _prefixes(self, tokens: Tokens) -> list[Tokens]:
        return [tokens[:end] for end in range(self._page_size, len(tokens) + 1, self._page_size)]

    def _protected(self) -> set[Tokens]:
        return {prefix for held in self._all_locks() for prefix in self._prefixes(held.tokens)}

    def _held_states(self) -> set[Tokens]:
        return {lock.tokens for lock in self._all_locks() if lock.holds_state}

    def _all_locks(self) -> list[HeldLock]:
        return self.locks

    @staticmethod
    def _alloc(pool: CheckedSlots, num_slots: int) -> SlotArray:
        slots = pool.alloc(num_slots)
        assert slots is not None, "the pool of the model is too small"
        return slots


def key_of(tokens: Tokens) -> RadixKey:
    """A key of these tokens in the default namespace."""
    return RadixKey(np.array(tokens, dtype=np.int64))
