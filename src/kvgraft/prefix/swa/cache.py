"""Prefix cache for hybrid models: full and sliding-window attention over one radix tree, with a slot pool for each.

A node always has its full-attention slots. Its sliding-window slots may be freed on their own (a tombstone), because
a window layer only reads the tokens of its window (`kvgraft.windows`): after a gap, a prefix is usable again once a
whole sliding window of live KV follows, or from the next border of a chunk on.

Source: the behaviour follows SGLang's SWARadixCache (pull request #7367 and its fixes up to 0.5.20). Departures, with
reasons in docs/design/prefix-cache.md: nodes hold the slots of both pools, so that healing a tombstone never touches
full-attention slots in use; lock borders are positions; evictable nodes and windows wait in heaps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.errors import ConfigError, CorruptCacheError
from kvgraft.prefix.lifecycle import StoredRow
from kvgraft.prefix.results import NO_SLOTS, EvictResult, PrefixHandle, SlotArray, join_slots
from kvgraft.prefix.swa.base import BaseSWACache
from kvgraft.prefix.swa.node import SWALock, SWANode
from kvgraft.prefix.swa.results import SWAInsertResult

if TYPE_CHECKING:
    from kvgraft.prefix.request import RequestRow
    from kvgraft.prefix.semantic_fallback import SlotCopier
    from kvgraft.substitution import SemanticPrefixProvider
    from kvgraft.token_key import RadixKey


class SWARadixCache(BaseSWACache):
    """A radix tree with nodes that own slots of a full-attention and of a sliding-window pool. Not thread-safe."""

    # insert

    def insert(
        self,
        key: RadixKey,
        kv_indices: SlotArray | None = None,
        *,
        after: PrefixHandle | None = None,
        priority: int = 0,
        counted_len: int | None = None,
        swa_indices: SlotArray | None = None,
        prev_prefix_len: int = 0,
        swa_evicted_len: int = 0,
    ) -> SWAInsertResult:
        """Store `key` in whole pages and heal tombstones along it.

        Per stored node after `prev_prefix_len` that covers positions `[s, e)`:

            live                    the offered slots are duplicates
            tombstone, evicted <= s   healed: takes the offered window slots
            tombstone, s < evicted < e  cut at `evicted`, the lower part is healed
            tombstone, evicted >= e   stays

        The node's full-attention slots stay in every case, because requests that hold the prefix use them. After what
        is stored follow a tombstone up to `swa_evicted_len` and a live leaf; if nothing of the rest is live, none.

        Args:
            key: Tokens and namespace.
            kv_indices: Full-attention slot of each element; not read below `prev_prefix_len`.
            after: Handle of a stored prefix no longer than `prev_prefix_len`, after which to start.
            priority: For the `priority` policy.
            counted_len: The same request's earlier inserts ended here: they count no second hit. None for `after`'s end.
            swa_indices: Sliding-window slot of each element; not read below `max(prev_prefix_len, swa_evicted_len)`.
            prev_prefix_len: Positions with slots that the cache owns already, under the caller's lock.
            swa_evicted_len: Positions below it have no window slots to offer; whole pages.

        Raises:
            ConfigError: Slots, lengths or handle do not fit the key.
            CorruptCacheError: `prev_prefix_len` is not the length of a stored prefix of the key.
        """
        slots = self._offered(key, kv_indices)
        windows = slots if swa_indices is None and self._simulated else self._offered(key, swa_indices)
        if self._disabled:
            return SWAInsertResult(0, 0, self._tree.root)
        start = self._insert_start(key, after, prev_prefix_len, swa_evicted_len)
        total_len = key.aligned_len(self._page_size)
        path, node = self._walk(key, start, total_len)
        counted_len = start.end if counted_len is None else counted_len
        self._credit(start, path, total_len, priority, counted_len)
        freed, swa_freed = self._merge(path, slots, windows, prev_prefix_len, swa_evicted_len)
        prefix_len = node.end
        if prefix_len < prev_prefix_len:
            raise CorruptCacheError(
                f"{prev_prefix_len} tokens are said to be stored, {prefix_len} are: lock the prefix"
            )
        if max(swa_evicted_len, prefix_len) < total_len:
            node = self._add_tail(
                node, key, slots, windows, evicted=swa_evicted_len, priority=priority, counted_len=counted_len
            )
        self._components.touch(node, self._tree.now)
        return SWAInsertResult(prefix_len, node.end, node, join_slots(freed), join_slots(swa_freed))

    def _insert_start(
        self, key: RadixKey, after: PrefixHandle | None, prev_prefix_len: int, swa_evicted_len: int
    ) -> SWANode:
        if prev_prefix_len % self._page_size or swa_evicted_len % self._page_size:
            raise ConfigError(
                f"prev_prefix_len {prev_prefix_len} and swa_evicted_len {swa_evicted_len} must be multiples of the page "
                f"size {self._page_size}"
            )
        node = self._prefix_of(key, after)
        if node.end > prev_prefix_len:
            raise ConfigError(f"`after` ends at {node.end}, after prev_prefix_len {prev_prefix_len}")
        return node

    def _merge(
        self, path: list[SWANode], slots: SlotArray, windows: SlotArray, prev_prefix_len: int, evicted: int
    ) -> tuple[list[SlotArray], list[SlotArray]]:
        """Return duplicates of both pools along `path`, healing tombstones."""
        freed: list[SlotArray] = []
        swa_freed: list[SlotArray] = []
        for node in path:
            start, end = node.start, node.end
            if end <= prev_prefix_len:
                continue
            if start < prev_prefix_len:
                raise CorruptCacheError(f"prev_prefix_len {prev_prefix_len} lies inside a node: lock the prefix")
            freed.append(slots[start:end].copy())
            if node.component is not None:
                swa_freed.append(windows[max(start, evicted) : max(end, evicted)].copy())
            elif evicted < end:
                if start < evicted:
                    self._divide(node, evicted - start)
                self._components.attach(node, windows[max(start, evicted) : end], self._tree.now)
        return freed, swa_freed

    def _add_tail(
        self,
        parent: SWANode,
        key: RadixKey,
        slots: SlotArray,
        windows: SlotArray,
        *,
        evicted: int,
        priority: int,
        counted_len: int,
    ) -> SWANode:
        """Add what is not stored: a tombstone up to `evicted` and a live leaf after it."""
        total_len = key.aligned_len(self._page_size)
        if parent.end < evicted:
            parent = self._add_node(parent, key, slots, evicted, priority, hit_count=int(evicted > counted_len))
        leaf = self._add_node(parent, key, slots, total_len, priority, hit_count=int(total_len > counted_len))
        self._components.attach(leaf, windows[leaf.start : leaf.end], self._tree.now)
        cut = self.window.first_needed(total_len) // self._page_size * self._page_size
        if self._leaf_cap and leaf.start < cut < leaf.end:
            self._divide(leaf, cut - leaf.start)
        self._queue.add(leaf)
        return leaf

    # requests: of a row, `[max(protected_len, swa_evicted_len), ...)` of the window slots are the request's own

    def store_row(self, req: RequestRow) -> StoredRow:
        """Insert what `req` has computed, in both pools."""
        _check_row(req)
        key = req.key()
        result = self.insert(
            key,
            req.kv_indices[: len(key)],
            after=req.handle,
            priority=req.priority,
            counted_len=req.num_inserted,
            swa_indices=req.swa_indices[: len(key)],
            prev_prefix_len=req.protected_len,
            swa_evicted_len=req.swa_evicted_len,
        )
        return StoredRow(result.handle, result.total_len, EvictResult(result.freed, result.swa_freed))

    def point_row(self, req: RequestRow, stored: StoredRow) -> None:
        """Let both rows of `req` name the cache's slots."""
        start = req.protected_len
        super().point_row(req, stored)
        req.swa_indices[start : stored.total_len] = self.swa_path_slots(stored.handle, start)

    def lock_inserted(self, handle: PrefixHandle) -> SWALock:
        """Lock the prefix of an insert, and as much of its last window as is live."""
        node = self._tree.resolve(handle)
        return self._lock(node, self._components.reach(node))

    def cache_finished_req(self, req: RequestRow, *, is_insert: bool = True) -> EvictResult:
        """Store and release as any cache; a row without slots of both pools is refused."""
        _check_row(req)
        return super().cache_finished_req(req, is_insert=is_insert)

    def advance_window(self, req: RequestRow) -> EvictResult:
        """Free the window slots that `req` does not read any more: its own, and early the window of its lock.

        To be called at intervals during prefill and decode. The frontier only advances. Complexity: O(tokens freed).
        """
        _check_row(req)
        freed = [req.leave_windows(self.window.frontier(len(req.key()), self.page_size))]
        lock = req.handle
        past_prefix = self.window.first_needed(req.committed_len) >= req.protected_len
        if past_prefix and isinstance(lock, SWALock) and not lock.swa_released:
            freed.append(self.dec_swa_lock_only(lock).swa_freed)
            req.swa_indices[: req.protected_len] = -1
        return EvictResult(NO_SLOTS, join_slots(freed))

    def set_semantic_provider(
        self,
        provider: SemanticPrefixProvider | None,
        *,
        copy_slots: SlotCopier | None = None,
        deadline_s: float | None = None,
    ) -> None:
        """Refuse: a donor's windows may be gone, so there is nothing whole to copy."""
        if provider is not None:
            raise ConfigError("SWARadixCache takes no semantic provider; use RadixCache for models without windows")


def _check_row(req: RequestRow) -> None:
    if len(req.swa_indices) != len(req.kv_indices):
        raise ConfigError(
            f"the row has {len(req.kv_indices)} full-attention and {len(req.swa_indices)} sliding-window slots; "
            "give both, with -1 where a window slot is gone"
        )
