"""Test class for any prefix cache: subclass it, build your cache in `make_cache`, run pytest.

    class TestMine(PrefixCacheTests):
        def make_cache(self, page_size):
            return MyCache(page_size)

Requests go through `RequestRow`, so caches with one pool, with two and with states take part alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import pytest

from kvgraft.errors import CorruptCacheError
from kvgraft.prefix import EvictResult, PrefixCache, RequestRow, StateRadixCache
from kvgraft.testing.slots import CheckedSlots
from kvgraft.token_key import RadixKey


class PrefixCacheTests(ABC):
    """Tests of the contract of `PrefixCache`; slots are conserved in each."""

    @abstractmethod
    def make_cache(self, page_size: int) -> PrefixCache:
        """Build an empty cache; the pools are as large as `CheckedSlots(4096)`."""

    @pytest.fixture(params=[1, 4, 16])
    def owner(self, request: pytest.FixtureRequest) -> SlotOwner:
        """A cache with its pools."""
        return SlotOwner(self.make_cache(request.param))

    def test_an_empty_cache_matches_nothing(self, owner: SlotOwner) -> None:
        """Also for keys below a page."""
        for num_tokens in (0, 1, 100):
            match = owner.cache.match_prefix(RadixKey(np.arange(num_tokens)))
            assert (match.prefix_len, len(match.kv_indices)) == (0, 0)
        owner.check()

    def test_what_is_stored_is_found_in_whole_pages(self, owner: SlotOwner) -> None:
        """And nothing of it in another namespace."""
        owner.run(np.arange(100))
        expected = 0 if owner.cache.disabled else 100 // owner.cache.page_size * owner.cache.page_size
        assert owner.cache.match_prefix(RadixKey(np.arange(200))).prefix_len == expected
        assert owner.cache.match_prefix(RadixKey(np.arange(200), "other")).prefix_len == 0
        assert owner.cache.match_prefix(RadixKey(np.arange(200), None, "salt")).prefix_len == 0
        owner.check()

    def test_a_look_tells_what_a_match_would_find(self, owner: SlotOwner) -> None:
        """And keeps no prefix from eviction."""
        owner.run(np.arange(64))
        owner.run(np.concatenate([np.arange(32), np.arange(200, 248)]))
        for token_ids in (np.arange(40), np.arange(100), np.arange(200, 300), np.empty(0, np.int64)):
            key = RadixKey(token_ids)
            looked = owner.cache.look(key)
            match = owner.cache.match_prefix(key)
            assert looked == (match.prefix_len, match.host_hit_len)
        owner.check()

    def test_locked_prefixes_survive_eviction(self, owner: SlotOwner) -> None:
        """Until the lock is given back."""
        owner.run(np.arange(64))
        match = owner.cache.match_prefix(RadixKey(np.arange(64)))
        lock = owner.cache.inc_lock_ref(match.handle)
        owner.take_back(owner.cache.evict(10_000))
        assert owner.cache.match_prefix(RadixKey(np.arange(64))).prefix_len == match.prefix_len
        owner.take_back(owner.cache.dec_lock_ref(lock))
        owner.take_back(owner.cache.evict(10_000))
        assert owner.cache.total_size == 0
        owner.check()

    def test_a_reset_forgets_all(self, owner: SlotOwner) -> None:
        """And makes handles stale."""
        owner.run(np.arange(64))
        handle = owner.cache.match_prefix(RadixKey(np.arange(64))).handle
        owner.cache.reset()
        assert owner.cache.total_size == 0
        owner.cache.check()
        if not owner.cache.disabled:
            with pytest.raises(CorruptCacheError):
                owner.cache.inc_lock_ref(handle)

    def test_random_requests_conserve_slots(self, owner: SlotOwner) -> None:
        """Chunks, duplicates, aborts and eviction in any order."""
        rng = np.random.default_rng(0)
        running: list[RequestRow] = []
        for step in range(300):
            action = int(rng.integers(5))
            if action == 0 and len(running) < 4:
                running.append(owner.begin(np.repeat(rng.integers(0, 2, int(rng.integers(1, 20))), 4), str(step)))
            elif action == 1 and running:
                owner.compute(running[0], int(rng.integers(20)))
            elif action == 2 and running:
                owner.take_back(owner.cache.cache_unfinished_req(running[0]))
            elif action == 3 and running:
                is_insert = bool(rng.integers(3))
                owner.take_back(owner.cache.cache_finished_req(running.pop(0), is_insert=is_insert))
            else:
                owner.take_back(owner.cache.evict(int(rng.integers(30))))
            owner.check(running)


class SlotOwner:
    """The least an engine does around a cache."""

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache
        self.full, self.swa = CheckedSlots(4096), CheckedSlots(4096, first=100_000)
        self.states = CheckedSlots(4096, first=200_000)

    def begin(self, token_ids: np.ndarray, rid: str = "r") -> RequestRow:
        """Start a request from what is stored of its prompt, locked; its last token is always computed."""
        req = RequestRow(rid, np.asarray(token_ids), np.empty(0, np.int64), prompt_len=len(token_ids))
        match = self.cache.match_prefix(req.key(len(token_ids) - 1))
        req.adopt(match, self.cache.inc_lock_ref(match.handle))
        if not len(req.swa_indices):
            req.swa_indices = np.full(len(req.kv_indices), -1)
            req.swa_evicted_len = req.protected_len
        return req

    def compute(self, req: RequestRow, num_tokens: int) -> None:
        """Give the next tokens slots in both pools, and record the state at the end of the last whole page."""
        num_tokens = min(num_tokens, len(req.token_ids) - req.committed_len)
        full, swa = self.full.alloc(num_tokens), self.swa.alloc(num_tokens)
        assert full is not None, "the pool of the suite is too small"
        assert swa is not None, "the pool of the suite is too small"
        req.grow(full, swa)
        position = req.committed_len - req.committed_len % self.cache.page_size
        if position > req.protected_len and position not in req.states:
            states = self.states.alloc(1)
            assert states is not None, "the pool of the suite is too small"
            req.record_state(position, int(states[0]))

    def run(self, token_ids: np.ndarray) -> None:
        """Take a request from begin to end."""
        req = self.begin(token_ids)
        self.compute(req, len(token_ids))
        self.take_back(self.cache.cache_finished_req(req))

    def take_back(self, result: EvictResult) -> None:
        """Free what the cache returned."""
        self.full.free(result.freed)
        self.swa.free(result.swa_freed)
        self.states.free(result.state_freed)

    def check(self, running: list[RequestRow] | None = None) -> None:
        """Verify the cache and that every full-attention slot and every state is in one place."""
        self.cache.check()
        held = sum(req.committed_len - req.protected_len for req in running or [])
        assert self.full.available + self.cache.total_size + held == self.full.size
        stored = self.cache.state_total_size if isinstance(self.cache, StateRadixCache) else 0
        assert self.states.available + stored + sum(len(req.states) for req in running or []) == self.states.size
