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

import numpy as np

from kvgraft.errors import ConfigError, CorruptCacheError
from kvgraft.prefix.component.base import BaseComponentCache
from kvgraft.prefix.component.parts import TreeComponents
from kvgraft.prefix.lifecycle import StoredRow
from kvgraft.prefix.results import (
    NO_SLOTS,
    EvictResult,
    PrefixHandle,
    SlotArray,
    join_slots,
)
from kvgraft.prefix.swa.window import (
    SWAInsertResult,
    SWALock,
    SWAMatchResult,
    Window,
    check_windows,
    window_order,
)
from kvgraft.windows import window_kind

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Unpack

    from kvgraft.prefix.component.node import ComponentNode
    from kvgraft.prefix.radix.base import TreeOptions
    from kvgraft.prefix.request import RequestRow
    from kvgraft.token_key import RadixKey

    SWANode = ComponentNode[Window]


class SWARadixCache(BaseComponentCache[Window, SWALock, SWAMatchResult]):
    """A radix tree with nodes that own slots of a full-attention and of a sliding-window pool. Not thread-safe.

    Attributes:
        window: What rows of window layers read.

    Invariants (verified by `check`), besides those of a tree over two pools:
        - A window has one slot per element of its node; no slot of either pool is stored twice.
        - Receipts that cover a window never exceed the locks on or below its node (`full_lock_ref >= swa_lock_ref`).
    """

    _lock_class = SWALock
    _kind = "window"

    def __init__(
        self,
        page_size: int = 1,
        *,
        sliding_window_size: int | None = None,
        attention_chunk_size: int | None = None,
        leaf_cap: bool = False,
        simulated: bool = False,
        **options: Unpack[TreeOptions],
    ) -> None:
        """Make an empty cache.

        Args:
            page_size: Tokens per page.
            sliding_window_size: Tokens that a window layer reads, the current one included.
            attention_chunk_size: Instead, for layers that read the tokens of their own chunk (Llama 4): its size.
            leaf_cap: Cut a new leaf so that its tail is one window in whole pages; a lock then covers that tail instead
                of a whole prefill chunk.
            simulated: Without pools: an insert without slots takes the token ids as slots.
            options: As of `BaseRadixCache`; the policy orders full-attention leaves, windows leave least recently used first.
        """
        window = window_kind(sliding_window_size, attention_chunk_size)
        super().__init__(page_size, simulated=simulated, **options)
        self.window = window
        self._leaf_cap = leaf_cap
        self._components = TreeComponents(window_order)

    @property
    def sliding_window_size(self) -> int:
        """Tokens that a window layer reads at most: of chunks their size."""
        return self.window.size

    @property
    def swa_evictable_size(self) -> int:
        """Tokens of windows that no lock covers."""
        return self._components.evictable_size

    @property
    def swa_protected_size(self) -> int:
        """Tokens of windows under at least one lock."""
        return self._components.protected_size

    @property
    def swa_total_size(self) -> int:
        """Tokens that have sliding-window KV."""
        return self._components.total_size

    # lookup

    def _matched(self, path: list[SWANode], stop: int) -> SWAMatchResult:
        return SWAMatchResult(path, path[-1] if path else self._tree.root)

    def _usable_len(self, path: list[SWANode], stop: int) -> int:
        """Return the deepest page boundary from which a model can go on.

        That is the deepest one with a run of live windows, going up, that covers what the kind of window needs or reaches the
        root; at the border of a chunk that is nothing.
        """
        live_start = accepted = 0
        for node in path:
            end = min(node.end, stop)
            if node.component is None:
                live_start = end
                accepted = max(accepted, self.window.boundary(end, self._page_size))
            elif self.window.first_needed(end) >= live_start:
                accepted = end
        return accepted

    def _needed(self, node: SWANode) -> tuple[list[Window], int]:
        """Windows of whole nodes, up to the first tombstone; a lock holds and a match marks as many."""
        needed: list[Window] = []
        step, first = node, self.window.first_needed(node.end)
        while step.end > first and step.component is not None and step.parent is not None:
            needed.append(step.component)
            step = step.parent
        return needed, step.end

    def _first_needed(self, end: int) -> int:
        return self.window.first_needed(end)

    def _divide(self, node: SWANode, length: int) -> SWANode:
        """Cut as any node; a window is cut, too, and both halves are covered by the receipts that covered it."""
        upper = super()._divide(node, length)
        if node.component is not None:
            self._components.divided(upper, node.component.divide(upper))
            self._components.requeue(node.component)
        return upper

    def cut(self, key: RadixKey, position: int) -> None:
        """Let a node of a stored `key` end at the last page boundary up to `position`, where there is none yet.

        A match or a lock of what follows marks or covers whole nodes: cut where its window begins, it leaves what lies
        before alone. Nothing is marked as used.

        Complexity: O(position) at the speed of `memcmp`, plus O(nodes on the path).
        """
        length = min(position, len(key)) // self._page_size * self._page_size
        _, partial, run = self._tree.descend(key, self._tree.root, length)
        if partial is not None and partial.start + run == length:
            self._divide(partial, run)

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
        self._touch(node, self._tree.now)
        return SWAInsertResult(prefix_len, node.end, node, join_slots(freed), join_slots(swa_freed))

    def _insert_start(
        self, key: RadixKey, after: PrefixHandle | None, prev_prefix_len: int, swa_evicted_len: int
    ) -> SWANode:
        if prev_prefix_len % self._page_size or swa_evicted_len % self._page_size:
            raise ConfigError(
                f"prev_prefix_len {prev_prefix_len} and swa_evicted_len {swa_evicted_len} must be multiples of the page "
                f"size {self._page_size}"
            )
        node = self._tree.root if after is None else self._prefix_of(key, after)
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
                self._give_window(node, windows)
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
        self._give_window(leaf, windows)
        cut = self.window.first_needed(total_len) // self._page_size * self._page_size
        if self._leaf_cap and leaf.start < cut < leaf.end:
            self._divide(leaf, cut - leaf.start)
        self._queue.add(leaf)
        return leaf

    def _give_window(self, node: SWANode, windows: SlotArray) -> None:
        """Give a tombstone its part of the offered window slots, which are copied: used now and not covered."""
        self._components.attach(node, Window(node, windows[node.start : node.end], self._tree.now))

    # locks and eviction

    def dec_swa_lock_only(self, handle: PrefixHandle) -> EvictResult:
        """Release the window of a lock early, when decoding has passed it; full attention stays locked.

        Windows inside the tree become evictable; that of a leaf is freed now and the leaf becomes a tombstone.

        Raises:
            CorruptCacheError: The receipt's window was released before. Nothing has changed then.
        """
        lock = self._open_lock(handle)
        if lock.gave_back:
            raise CorruptCacheError("the window of this lock was released before")
        uncovered = self._give_components_back(lock)
        freed = [self._components.free(window).swa_indices for window in uncovered if not window.node.children]
        return EvictResult(NO_SLOTS, join_slots(freed))

    def evict(self, num_tokens: int, swa_num_tokens: int = 0) -> EvictResult:
        """Free at least so many tokens of each pool, or all that is unlocked.

        Unlocked leaves go first, in the order of the policy, with both kinds of slots; so do tombstones that become
        unlocked leaves thereby. If windows are still short, the least recently used go: of an unlocked leaf
        together with the leaf, otherwise alone.

        Complexity: O(log n) per dropped node or window plus O(tokens freed).
        """
        return self._evict_both(num_tokens, swa_num_tokens)

    def _freed(self, slots: list[SlotArray], components: Sequence[Window]) -> EvictResult:
        return EvictResult(join_slots(slots), join_slots([window.swa_indices for window in components]))

    def swa_path_slots(self, handle: PrefixHandle, start: int = 0) -> SlotArray:
        """Sliding-window slots of positions `[start, end)` of a stored prefix, -1 where they are gone."""
        parts: list[SlotArray] = []
        step: SWANode | None = self._tree.resolve(handle)
        while step is not None and step.end > start:
            slots = np.full(len(step), -1) if step.component is None else step.component.swa_indices
            parts.append(slots[max(start - step.start, 0) :])
            step = step.parent
        return join_slots(parts[::-1])

    def _check_kind(self, components: Sequence[Window]) -> None:
        check_windows(self._tree.root, components, unique_slots=not self._simulated)

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


def _check_row(req: RequestRow) -> None:
    if len(req.swa_indices) != len(req.kv_indices):
        raise ConfigError(
            f"the row has {len(req.kv_indices)} full-attention and {len(req.swa_indices)} sliding-window slots; "
            "give both, with -1 where a window slot is gone"
        )
