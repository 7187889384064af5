"""What every exact prefix cache offers, and the values it answers with. Nothing here knows a KV pool."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from kvgraft.prefix.key import RadixKey

SlotArray = NDArray[np.int64]
"""1-D indices of KV slots, one per token."""


class PrefixHandle:
    """Names one stored prefix; opaque to callers.

    Stays good while the prefix is stored, through splits and inserts. Whoever needs the prefix to stay locks the handle
    before anything may evict. A handle of a dropped prefix or of another cache is refused.
    """

    __slots__ = ()


@dataclass(frozen=True, slots=True, eq=False)
class MatchResult:
    """The longest stored prefix of a key.

    Attributes:
        kv_indices: Read-only int64 `(prefix_len,)`; the cache goes on owning these slots.
        prefix_len: Tokens matched, a multiple of the page size.
        handle: The stored prefix that was matched.
    """

    kv_indices: SlotArray
    prefix_len: int
    handle: PrefixHandle


@dataclass(frozen=True, slots=True, eq=False)
class InsertResult:
    """Which of the offered slots the cache took: `kv_indices[prefix_len:total_len]`.

    The caller keeps or frees the others: duplicates `[:prefix_len]` of what was stored before (where they are not the
    cache's own slots) and the tail `[total_len:]` that fills no page.

    Attributes:
        prefix_len: Tokens that were in the cache already.
        total_len: Tokens of the key that are in the cache now, its length in whole pages.
        handle: The stored prefix of `total_len` tokens.
    """

    prefix_len: int
    total_len: int
    handle: PrefixHandle


@dataclass(frozen=True, slots=True, eq=False)
class EvictResult:
    """Slots that the cache has forgotten and the caller frees: `freed`, int64 `(n,)`."""

    freed: SlotArray

    @property
    def num_tokens(self) -> int:
        """How many tokens were dropped."""
        return len(self.freed)


class PrefixCache(ABC):
    """Maps token prefixes to KV slots, per namespace and in whole pages.

    The cache decides and its owner frees: slots leave through results, never through a callback into a pool.
    Sizes are in tokens. Not thread-safe.
    """

    @property
    @abstractmethod
    def page_size(self) -> int:
        """Tokens per page; nothing is matched or stored in smaller pieces."""

    @property
    @abstractmethod
    def evictable_size(self) -> int:
        """Stored tokens that no lock protects."""

    @property
    @abstractmethod
    def protected_size(self) -> int:
        """Stored tokens under at least one lock."""

    @property
    def total_size(self) -> int:
        """Stored tokens."""
        return self.evictable_size + self.protected_size

    @abstractmethod
    def match_prefix(self, key: RadixKey) -> MatchResult:
        """Find the longest stored prefix of `key` in whole pages and mark it as used now.

        May restructure the cache (a match that ends inside a node splits it), never what it stores.
        """

    @abstractmethod
    def insert(self, key: RadixKey, kv_indices: SlotArray) -> InsertResult:
        """Store `key` in whole pages; the part that is not stored yet takes its slots from `kv_indices`.

        Args:
            key: Tokens and namespace; copied.
            kv_indices: One slot per token of `key`; copied.

        Raises:
            ConfigError: `kv_indices` are not integers, one per token.
        """

    @abstractmethod
    def evict(self, num_tokens: int) -> EvictResult:
        """Drop unlocked prefixes, the least valuable first, until `num_tokens` are freed or nothing unlocked is left.

        May free more: what is dropped are whole nodes.
        """

    @abstractmethod
    def inc_lock_ref(self, handle: PrefixHandle) -> None:
        """Keep the prefix of `handle` from eviction until as many `dec_lock_ref` follow.

        Raises:
            CorruptCacheError: The handle is of a dropped prefix or of another cache.
        """

    @abstractmethod
    def dec_lock_ref(self, handle: PrefixHandle) -> None:
        """Give back one lock of `handle`.

        Raises:
            CorruptCacheError: The handle holds no lock here. Nothing has changed then.
        """

    @abstractmethod
    def reset(self) -> SlotArray:
        """Forget everything, locked or not, and return every slot for the caller to free. Handles become stale."""

    @abstractmethod
    def check(self) -> None:
        """Verify every invariant; for tests and idle time.

        Raises:
            CorruptCacheError: The first one that does not hold.
        """
