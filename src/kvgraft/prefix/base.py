"""The contract of every exact prefix cache. Nothing here knows a KV pool."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from kvgraft.prefix import lifecycle
from kvgraft.prefix.lifecycle import StoredRow
from kvgraft.prefix.results import EvictResult, StoredLength

if TYPE_CHECKING:
    from kvgraft.prefix.request import RequestRow
    from kvgraft.prefix.results import (
        InsertResult,
        MatchPrefixParams,
        MatchResult,
        OutlineNode,
        PrefixHandle,
        SlotArray,
    )
    from kvgraft.token_key import RadixKey


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
        """Stored tokens, locked or not."""
        return self.evictable_size + self.protected_size

    def num_locks(self) -> int | None:
        """Count the locks on all prefixes but the empty one; None where a cache does not know."""
        return None

    def is_empty_prefix(self, handle: PrefixHandle) -> bool:
        """Return whether a handle, or a receipt, is of the empty prefix, whose locks are not counted."""
        return False

    @property
    def disabled(self) -> bool:
        """Whether the cache never stores anything."""
        return False

    @abstractmethod
    def match_prefix(self, params: MatchPrefixParams | RadixKey) -> MatchResult:
        """Find the longest stored prefix in whole pages and mark it as used now.

        May restructure the cache (a match that ends inside a node splits it), never what it stores. A bare key is a
        lookup without a request.
        """

    def look(self, key: RadixKey) -> StoredLength:
        """Say how much of `key` a match would find, without marking it as used.

        Caches that do not override this are asked for a match, which marks it.
        """
        match = self.match_prefix(key)
        return StoredLength(match.prefix_len, match.host_hit_len)

    @abstractmethod
    def insert(
        self,
        key: RadixKey,
        kv_indices: SlotArray | None = None,
        *,
        after: PrefixHandle | None = None,
        priority: int = 0,
        counted_len: int | None = None,
    ) -> InsertResult:
        """Store `key` in whole pages; the part that is not stored yet takes its slots from `kv_indices`.

        Args:
            key: Tokens and namespace; copied.
            kv_indices: Integers (len(key),), one slot per element of `key`; copied.
            after: Handle of a stored prefix with which `key` begins: the insert starts after it and costs only what
                follows. The caller vouches that its tokens are the key's own; namespace and last page are verified.
            priority: For the `priority` policy; the path keeps the largest it has seen.
            counted_len: The same request's earlier inserts ended here: they count no second hit. None for `after`'s end.

        Raises:
            ConfigError: `kv_indices` are not integers, one per element, or `after` is no prefix of `key`.
            CorruptCacheError: `after` is of a dropped prefix or of another cache.
        """

    @abstractmethod
    def evict(self, num_tokens: int) -> EvictResult:
        """Drop unlocked prefixes, the least valuable first, until `num_tokens` are freed or nothing unlocked is left.

        May free more: what is dropped are whole nodes.
        """

    @abstractmethod
    def inc_lock_ref(self, handle: PrefixHandle) -> PrefixHandle:
        """Keep the prefix of `handle` from eviction; returns the receipt that the matching `dec_lock_ref` takes.

        Raises:
            CorruptCacheError: The handle is of a dropped prefix or of another cache.
        """

    @abstractmethod
    def dec_lock_ref(self, handle: PrefixHandle) -> EvictResult:
        """Give back one lock; returns slots that are of no use any more, for the caller to free (mostly none).

        Raises:
            CorruptCacheError: The handle holds no lock here. Nothing has changed then.
        """

    @abstractmethod
    def path_slots(self, handle: PrefixHandle, start: int = 0) -> SlotArray:
        """Slots of positions `[start, end)` of a stored prefix, int64 (end - start,); they stay the cache's.

        Raises:
            CorruptCacheError: The handle is of a dropped prefix or of another cache.
        """

    @abstractmethod
    def reset(self) -> SlotArray:
        """Forget everything, locked or not, and return every slot for the caller to free. Handles become stale."""

    def rebuild(self) -> None:
        """Forget everything without looking at it: an interrupted change may have left anything. Handles become stale.

        The owner frees all slots by itself. Caches that do not override this are asked for a `reset`.
        """
        self.reset()

    @abstractmethod
    def check(self) -> None:
        """Verify every invariant; for tests and idle time. Raises `CorruptCacheError`."""

    def outline(self, limit: int) -> list[OutlineNode]:
        """Return up to `limit` nodes of the tree, parents before children; nothing where the cache is no tree."""
        return []

    def supports_streaming_session(self) -> bool:
        """Whether the cache keeps sessions itself; otherwise `create_tree_cache` wraps it where they are asked for."""
        return False

    # requests: one lifecycle for all caches; a tree with more than one pool says how its rows are stored

    def cache_unfinished_req(self, req: RequestRow) -> EvictResult:
        """Store what `req` has computed so far and go on with it: between chunks of a prefill, or at preemption.

        Points the row of `req` to the cache's slots, moves its lock and returns its duplicates for the caller to free.

        Raises:
            CorruptCacheError: The cache was reset since `req` began. Nothing is stored then, and the row keeps its slots.
        """
        return lifecycle.store_unfinished(self, req)

    def cache_finished_req(self, req: RequestRow, *, is_insert: bool = True) -> EvictResult:
        """Store what `req` has computed unless it must not be, release its lock and return what the caller frees.

        Afterwards the request owns nothing: every slot of its row is in the cache or in the result.

        Raises:
            CorruptCacheError: The cache was reset since `req` began. Nothing is stored then: `req.own_slots` names what the
                caller frees.
        """
        return lifecycle.store_finished(self, req, is_insert=is_insert)

    def store_row(self, req: RequestRow) -> StoredRow:
        """Insert what `req` has computed, after the prefix that it has locked; see `lifecycle`."""
        key = req.key()
        result = self.insert(
            key,
            req.kv_indices[: len(key)],
            after=req.handle,  # of an empty prefix, too: it says that the cache was not reset since
            priority=req.priority,
            counted_len=req.num_inserted,
        )
        duplicates = req.kv_indices[req.protected_len : result.prefix_len].copy()
        return StoredRow(result.handle, result.total_len, EvictResult(duplicates))

    def point_row(self, req: RequestRow, stored: StoredRow) -> None:
        """Let the row of `req` name the cache's slots where the cache holds its positions now."""
        start = req.protected_len
        req.kv_indices[start : stored.total_len] = self.path_slots(stored.handle, start)

    def lock_inserted(self, handle: PrefixHandle) -> PrefixHandle:
        """Lock the prefix of an insert; returns the receipt."""
        return self.inc_lock_ref(handle)

    def end_prompt(self, stored: StoredRow, req: RequestRow) -> None:  # noqa: B027 (optional)
        """Hear that `req` has ended, so that its prompt can be kept longer than its output."""
