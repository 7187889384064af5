"""Random operations on a plain prefix cache beside an oracle of pages; one seed, one sequence.

Tenants come and go all the time, and a reader of the events must know at any time what is stored, from a log that keeps
nothing of what was fetched.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import numpy as np
from tests.support.swa_walk import random_tokens

from kvgraft.events import AllBlocksCleared, BlockStored, EventLog
from kvgraft.prefix import RadixCache, RadixKey
from kvgraft.testing.slots import CheckedSlots

if TYPE_CHECKING:
    from collections.abc import Hashable

    from tests.support.swa_model import Tokens

    from kvgraft.prefix import PrefixHandle, SlotArray

Prefix = tuple["Hashable", "Tokens"]

_TENANCY = 50
"""Operations for which a tenant is new; it is known for as many more, and never seen again."""


class RadixModel:
    """A cache, the pool that its slots come from, and a dict of stored pages.

    Attributes:
        cache: The cache under test.
        num_operations: Operations so far.
    """

    def __init__(self, seed: int, page_size: int, policy: str, *, size: int = 2048) -> None:
        self._log = EventLog()
        self.cache = RadixCache(page_size, policy=policy, events=self._log)
        self.num_operations = 0
        self._rng = Random(seed)
        self._page_size = page_size
        self._pool = CheckedSlots(size)
        self._pages: dict[Prefix, list[int]] = {}
        self._announced: set[bytes | int] = set()
        self._locks: list[tuple[PrefixHandle, Prefix]] = []

    def step(self) -> None:
        """Do one random operation and compare.

        Raises:
            AssertionError: Cache and oracle differ.
            CorruptCacheError: An invariant does not hold.
        """
        rng = self._rng
        self.num_operations += 1
        tenant = self.num_operations // _TENANCY
        salt: Hashable = rng.choice((None, f"tenant-{tenant}", f"tenant-{tenant - 1}"))
        tokens = random_tokens(rng, self._page_size, 7)
        action = rng.random()
        if action < 0.35:
            self._match(salt, tokens)
        elif action < 0.55:
            self._insert(salt, tokens, None)
        elif action < 0.7 and self._locks:
            handle, (salt, prefix) = rng.choice(self._locks)
            self._insert(salt, prefix + tokens, handle)
        elif action < 0.85:
            self._evict(rng.randrange(4 * self._page_size))
        elif action < 0.998 and self._locks:
            handle, _ = self._locks.pop(rng.randrange(len(self._locks)))
            self.cache.dec_lock_ref(handle)
        elif action >= 0.998:
            self._locks.clear()
            self._forget(self.cache.reset())
        self._check()

    def _match(self, salt: Hashable, tokens: Tokens) -> None:
        result = self.cache.match_prefix(self._key(salt, tokens))
        stored = [self._pages[prefix] for prefix in self._stored(salt, tokens)]
        assert result.kv_indices.tolist() == [slot for page in stored for slot in page]
        if len(self._locks) < 4 and self._rng.random() < 0.4:
            self._locks.append((self.cache.inc_lock_ref(result.handle), (salt, tokens[: result.prefix_len])))

    def _insert(self, salt: Hashable, tokens: Tokens, after: PrefixHandle | None) -> None:
        if len(tokens) > self._pool.available:
            self._evict(len(tokens) - self._pool.available)
        slots = self._pool.alloc(len(tokens))
        assert slots is not None, "the pool of the model is too small"
        trimmed = self._rng.randrange(5)
        result = self.cache.insert(self._key(salt, tokens), slots, after=after, priority=trimmed)
        prefix_len = len(self._stored(salt, tokens)) * self._page_size
        total_len = len(tokens) // self._page_size * self._page_size
        assert (result.prefix_len, result.total_len) == (prefix_len, total_len)
        self._pool.free(np.concatenate([slots[:prefix_len], slots[total_len:]]))
        for prefix in self._prefixes(salt, tokens)[prefix_len // self._page_size :]:
            end = len(prefix[1])
            self._pages[prefix] = slots[end - self._page_size : end].tolist()

    def _evict(self, num_tokens: int) -> None:
        evictable = self.cache.evictable_size
        trim = self._rng.random() < 0.3
        freed = self.cache.evict(num_tokens, trim=trim).freed
        assert len(freed) >= min(num_tokens, evictable)
        assert not trim or len(freed) < num_tokens + self._page_size
        self._forget(freed)

    def _forget(self, freed: SlotArray) -> None:
        self._pool.free(freed)
        gone, protected = set(freed.tolist()), self._protected()
        for prefix, page in list(self._pages.items()):
            if page[0] in gone:
                assert prefix not in protected, "a locked prefix was freed"
                gone.difference_update(page)
                del self._pages[prefix]
        assert not gone, "slots were freed that the cache did not hold"
        for salt, tokens in self._pages:
            above = (salt, tokens[: -self._page_size])
            assert not above[1] or above in self._pages, "a prefix lost its beginning"

    def _check(self) -> None:
        self.cache.check()
        protected = len(self._protected()) * self._page_size
        assert self.cache.protected_size == protected
        assert self.cache.total_size == len(self._pages) * self._page_size
        assert self._pool.available + self.cache.total_size == self._pool.size
        self._replay()

    def _replay(self) -> None:
        for event in self._log.take():
            if isinstance(event, AllBlocksCleared):
                self._announced.clear()
            elif isinstance(event, BlockStored):
                assert self._announced.isdisjoint(event.block_hashes), "a page was stored twice"
                self._announced.update(event.block_hashes)
            else:
                assert self._announced.issuperset(event.block_hashes), "a page was removed that was never stored"
                self._announced.difference_update(event.block_hashes)
        assert len(self._announced) == len(self._pages), "the events do not say what is stored"
        kept = sum(len(value) for value in vars(self._log).values() if isinstance(value, dict | list | set))
        assert not kept, f"the log keeps {kept} entries of what was fetched"

    def _key(self, salt: Hashable, tokens: Tokens) -> RadixKey:
        return RadixKey(np.array(tokens, dtype=np.int64), None, salt)

    def _prefixes(self, salt: Hashable, tokens: Tokens) -> list[Prefix]:
        return [(salt, tokens[:end]) for end in range(self._page_size, len(tokens) + 1, self._page_size)]

    def _stored(self, salt: Hashable, tokens: Tokens) -> list[Prefix]:
        return [prefix for prefix in self._prefixes(salt, tokens) if prefix in self._pages]

    def _protected(self) -> set[Prefix]:
        return {prefix for _, (salt, tokens) in self._locks for prefix in self._prefixes(salt, tokens)}
