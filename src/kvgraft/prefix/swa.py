"""Prefix cache for hybrid models: full and sliding-window attention over one radix tree, with a slot pool for each.

A node always has its full-attention slots. Its sliding-window slots may be freed on their own (a tombstone), because
a window layer only reads the last `sliding_window_size` tokens: behind a gap, a prefix is usable again once a whole
window of live KV follows, or not at all if it is shorter.

Source: the behaviour follows SGLang's SWARadixCache (pull request #7367 and its fixes up to 0.5.20). Departures, with
reasons in docs/design/prefix-cache.md: nodes hold the slots of both pools, so that healing a tombstone never touches
full-attention slots in use; lock borders are positions; evictable nodes and windows wait in heaps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.errors import ConfigError, CorruptCacheError
from kvgraft.prefix.base import (
    NO_SLOTS,
    NOTHING_FREED,
    EvictResult,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
    PrefixHandle,
    SlotArray,
    join_slots,
)
from kvgraft.prefix.eviction import EvictionKey, EvictionPolicy, EvictionQueue
from kvgraft.prefix.key import RadixKey
from kvgraft.prefix.radix import BaseRadixCache
from kvgraft.prefix.swa_invariants import check_hybrid_tree
from kvgraft.prefix.swa_lifecycle import advance_window, store_finished, store_unfinished
from kvgraft.prefix.swa_node import SWALock, SWANode, Window

if TYPE_CHECKING:
    from kvgraft.prefix.events import EventLog
    from kvgraft.prefix.request import CacheRequest
    from kvgraft.prefix.semantic_prefix import SemanticPrefixProvider, SlotCopier


class SWAMatchResult(MatchResult):
    """A match with the slots of both pools."""

    __slots__ = ("_path",)

    def __init__(self, path: list[SWANode], handle: SWANode) -> None:
        super().__init__([node.kv_indices for node in path], handle.end, handle)
        self._path = [(len(node), None if node.window is None else node.window.swa_indices) for node in path]

    @property
    def swa_indices(self) -> SlotArray:
        """Int64 `(prefix_len,)` slots of the sliding-window pool, -1 where they are gone. Complexity: O(prefix_len)."""
        return join_slots([np.full(length, -1) if slots is None else slots for length, slots in self._path])


@dataclass(frozen=True, slots=True, eq=False)
class SWAInsertResult(InsertResult):
    """What the cache took, and which of the offered slots are duplicates.

    Attributes:
        freed: Offered full-attention slots of `[prev_prefix_len, prefix_len)`: the cache keeps its own.
        swa_freed: Offered sliding-window slots there that healed no tombstone.
    """

    freed: SlotArray = field(default_factory=lambda: NO_SLOTS)
    swa_freed: SlotArray = field(default_factory=lambda: NO_SLOTS)


def _window_order(window: Window) -> EvictionKey:
    """Least recently used first; of one access the one nearest to the root.

    All windows that one access needs share its time. So when the first of them goes and the branch cannot be matched
    any more, the rest of it goes next, before whole windows of other branches (SGLang #35515).
    """
    return (window.last_access, window.node.end)


class SWARadixCache(BaseRadixCache[SWANode]):
    """A radix tree whose nodes own slots of a full-attention and of a sliding-window pool. Not thread-safe.

    Invariants (verified by `check`), besides those of a radix tree:
        - A window has one slot per element of its node; no slot of either pool is stored twice.
        - Receipts that cover a window never exceed the locks on or below its node (`full_lock_ref >= swa_lock_ref`).
        - A leaf without a window is locked.
        - The window queue holds the uncovered windows and nothing else.
        - `swa_evictable_size` and `swa_protected_size` are the tokens of uncovered and covered windows.
    """

    _node_class = SWANode

    def __init__(
        self,
        page_size: int = 1,
        *,
        sliding_window_size: int,
        leaf_cap: bool = False,
        policy: EvictionPolicy | str = "lru",
        policy_config: dict[str, int] | None = None,
        events: EventLog | None = None,
        disabled: bool = False,
        simulated: bool = False,
    ) -> None:
        """Make an empty cache.

        Args:
            page_size: Tokens per page.
            sliding_window_size: Tokens that a window layer reads, the current one included.
            leaf_cap: Cut a new leaf so that its tail is one window in whole pages; a lock then covers that tail instead
                of a whole prefill chunk.
            policy: Order of eviction of full-attention leaves, by name or as a policy. Windows leave least recently
                used first.
            policy_config: Parameters for a policy given by name.
            events: Where stored and removed pages are recorded.
            disabled: Store and match nothing.
            simulated: Without pools: an insert without slots takes the token ids as slots.
        """
        if sliding_window_size < 1:
            raise ConfigError(f"sliding_window_size must be at least 1, not {sliding_window_size}")
        super().__init__(
            page_size,
            policy=policy,
            policy_config=policy_config,
            events=events,
            disabled=disabled,
            simulated=simulated,
        )
        self.sliding_window_size = sliding_window_size
        self._cap = -(-sliding_window_size // page_size) * page_size if leaf_cap else 0
        self._windows: EvictionQueue[Window] = EvictionQueue(_window_order)
        self._swa_evictable_size = 0
        self._swa_protected_size = 0

    @property
    def swa_evictable_size(self) -> int:
        """Tokens of windows that no lock covers."""
        return self._swa_evictable_size

    @property
    def swa_protected_size(self) -> int:
        """Tokens of windows under at least one lock."""
        return self._swa_protected_size

    @property
    def swa_total_size(self) -> int:
        """Tokens that have sliding-window KV."""
        return self._swa_evictable_size + self._swa_protected_size

    # lookup

    def match_prefix(self, params: MatchPrefixParams | RadixKey) -> SWAMatchResult:
        """Find the deepest page boundary behind which a model can go on.

        That is the deepest one whose run of live windows, going up, is at least `sliding_window_size` or reaches the
        root. Marks the accepted path as used now; windows only as deep as one window reaches, so that dead ones age.
        """
        return self._match_prefix_exact(params if isinstance(params, RadixKey) else params.key)

    def _match_prefix_exact(self, key: RadixKey) -> SWAMatchResult:
        root = self._tree.root
        if self._disabled:
            return SWAMatchResult([], root)
        now = self._tree.tick()
        path = self._accepted_path(key)
        for node in path:
            node.last_access = now
        last = path[-1] if path else root
        self._touch_windows(last)
        if last.queue_index >= 0:
            self._queue.update(last)
        return SWAMatchResult(path, last)

    def _accepted_path(self, key: RadixKey) -> list[SWANode]:
        path, partial, run = self._tree.descend(key, self._tree.root, key.aligned_len(self._page_size))
        window = self.sliding_window_size
        live, num_accepted = float("inf"), 0
        for index, node in enumerate(path):
            if node.window is not None:
                live += len(node)
                continue
            if live >= window:
                num_accepted = index
            live = 0
        if live >= window:
            num_accepted = len(path)
        if partial is not None and partial.window is not None and live + run >= window:
            path.append(self._divide(partial, run))
            num_accepted = len(path)
        return path[:num_accepted]

    def _touch_windows(self, node: SWANode) -> None:
        """Mark windows as used now, upwards from `node`, until a whole window is covered."""
        covered, now = 0, self._tree.now
        step: SWANode | None = node
        while step is not None and step.window is not None and covered < self.sliding_window_size:
            step.window.last_access = now
            if step.window.queue_index >= 0:
                self._windows.update(step.window)
            covered += len(step)
            step = step.parent

    def _divide(self, node: SWANode, length: int) -> SWANode:
        upper = super()._divide(node, length)
        if upper.window is not None and not upper.window.lock_ref:
            self._windows.add(upper.window)
            assert node.window is not None
            self._windows.update(node.window)
        return upper

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

        Per stored node behind `prev_prefix_len` that covers positions `[s, e)`:

            live                    the offered slots are duplicates
            tombstone, evicted <= s   healed: takes the offered window slots
            tombstone, s < evicted < e  cut at `evicted`, the lower part is healed
            tombstone, evicted >= e   stays

        The node's full-attention slots stay in every case, because requests that hold the prefix use them. Behind what
        is stored follow a tombstone up to `swa_evicted_len` and a live leaf; if nothing of the rest is live, none.

        Args:
            key: Tokens and namespace.
            kv_indices: Full-attention slot of each element; not read below `prev_prefix_len`.
            after: Handle of a stored prefix no longer than `prev_prefix_len`, behind which to start.
            priority: For the `priority` policy.
            counted_len: The same request's earlier inserts ended here: they count no second hit. None for `after`'s end.
            swa_indices: Sliding-window slot of each element; not read below `max(prev_prefix_len, swa_evicted_len)`.
            prev_prefix_len: Positions whose slots the cache owns already, under the caller's lock.
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
        self._touch_windows(node)
        return SWAInsertResult(prefix_len, node.end, node, join_slots(freed), join_slots(swa_freed))

    def _insert_start(
        self, key: RadixKey, after: PrefixHandle | None, prev_prefix_len: int, swa_evicted_len: int
    ) -> SWANode:
        if prev_prefix_len % self._page_size or swa_evicted_len % self._page_size:
            raise ConfigError(
                f"prev_prefix_len {prev_prefix_len} and swa_evicted_len {swa_evicted_len} must be multiples of the page "
                f"size {self._page_size}"
            )
        if after is None:
            return self._tree.root
        node = self._tree.resolve_prefix(key, after.node if isinstance(after, SWALock) else after)
        if node.end > prev_prefix_len:
            raise ConfigError(f"`after` ends at {node.end}, behind prev_prefix_len {prev_prefix_len}")
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
            if node.window is not None:
                swa_freed.append(windows[max(start, evicted) : max(end, evicted)].copy())
            elif evicted < end:
                if start < evicted:
                    self._divide(node, evicted - start)
                self._set_window(node, windows[max(start, evicted) : end])
        return freed, swa_freed

    def _set_window(self, node: SWANode, swa_indices: SlotArray) -> None:
        node.window = Window(node, swa_indices, self._tree.now)
        self._swa_evictable_size += len(node)
        self._windows.add(node.window)

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
        """Add what is not stored: a tombstone up to `evicted` and a live leaf behind it."""
        total_len = key.aligned_len(self._page_size)
        if parent.end < evicted:
            parent = self._add_node(parent, key, slots, evicted, priority, hit_count=int(evicted > counted_len))
        leaf = self._add_node(parent, key, slots, total_len, priority, hit_count=int(total_len > counted_len))
        self._set_window(leaf, windows[leaf.start : leaf.end])
        if self._cap and len(leaf) > self._cap:
            self._divide(leaf, len(leaf) - self._cap)
        self._queue.add(leaf)
        return leaf

    def _add_node(
        self, parent: SWANode, key: RadixKey, slots: SlotArray, stop: int, priority: int, *, hit_count: int
    ) -> SWANode:
        if parent.queue_index >= 0:
            self._queue.remove(parent)
        node = self._tree.add_leaf(parent, key, slots, parent.end, stop, priority=priority, hit_count=hit_count)
        self._evictable_size += len(node)
        if self._events is not None:
            self._events.stored(node, self._page_size)
        return node

    # locks

    def inc_lock_ref(self, handle: PrefixHandle) -> SWALock:
        """Keep a prefix from eviction, and its last window; returns the receipt.

        Raises:
            CorruptCacheError: The handle is of a dropped prefix or of another cache, or its window was evicted since.
        """
        node = self._tree.resolve(handle)
        covered = self._covered(node)
        if node.end and (
            not covered or (covered[-1].start and node.end - covered[-1].start < self.sliding_window_size)
        ):
            raise CorruptCacheError("the window of this prefix was evicted: match again")
        return self._lock(node, covered)

    def lock_inserted(self, handle: PrefixHandle) -> SWALock:
        """Lock the prefix of an insert, and as much of its last window as is live."""
        node = self._tree.resolve(handle)
        return self._lock(node, self._covered(node))

    def _covered(self, node: SWANode) -> list[SWANode]:
        """Nodes whose windows a lock on `node` covers, upwards, ending in front of a tombstone."""
        covered: list[SWANode] = []
        step, missing = node, self.sliding_window_size
        while missing > 0 and step.window is not None and step.parent is not None:
            covered.append(step)
            missing -= len(step)
            step = step.parent
        return covered

    def _lock(self, node: SWANode, covered: list[SWANode]) -> SWALock:
        super().inc_lock_ref(node)
        for step in covered:
            window = step.window
            assert window is not None, "only live windows are covered"
            window.lock_ref += 1
            if window.lock_ref == 1:
                self._swa_evictable_size -= len(window)
                self._swa_protected_size += len(window)
                self._windows.remove(window)
        return SWALock(node, covered[-1].start if covered else node.end)

    def dec_lock_ref(self, handle: PrefixHandle) -> EvictResult:
        """Give back a lock; returns the slots of tombstone leaves that only the lock kept.

        Raises:
            CorruptCacheError: The receipt is none, was given back before, or is of another cache. Nothing has changed.
        """
        lock = self._open_lock(handle)
        if not lock.swa_released:
            self._release_windows(lock)
        super().dec_lock_ref(lock.node)
        lock.released = True
        node = lock.node
        if node.children or node.lock_ref or node.window is not None:
            return NOTHING_FREED
        self._queue.remove(node)
        freed, swa_freed = self._drop(node)
        return EvictResult(join_slots(freed), join_slots(swa_freed))

    def dec_swa_lock_only(self, handle: PrefixHandle) -> EvictResult:
        """Release the window of a lock early, when decoding has left it behind; full attention stays locked.

        Windows inside the tree become evictable; that of a leaf is freed now and the leaf becomes a tombstone.

        Raises:
            CorruptCacheError: The receipt's window was released before. Nothing has changed then.
        """
        lock = self._open_lock(handle)
        if lock.swa_released:
            raise CorruptCacheError("the window of this lock was released before")
        uncovered = self._release_windows(lock)
        lock.swa_released = True
        freed = [self._entomb(window) for window in uncovered if not window.node.children]
        return EvictResult(NO_SLOTS, join_slots(freed))

    def _open_lock(self, handle: PrefixHandle) -> SWALock:
        if not isinstance(handle, SWALock) or handle.released:
            raise CorruptCacheError("not a receipt of inc_lock_ref, or given back before")
        self._tree.resolve(handle.node)
        return handle

    def _release_windows(self, lock: SWALock) -> list[Window]:
        """Uncover the windows of a receipt; returns those that no receipt covers any more."""
        uncovered: list[Window] = []
        step = lock.node
        while step.start >= lock.swa_start and step.parent is not None:
            window = step.window
            assert window is not None, "a covered window is never freed"
            window.lock_ref -= 1
            if not window.lock_ref:
                self._swa_evictable_size += len(window)
                self._swa_protected_size -= len(window)
                self._windows.add(window)
                uncovered.append(window)
            step = step.parent
        return uncovered

    def _entomb(self, window: Window) -> SlotArray:
        """Free an uncovered, queued window in place; returns its slots."""
        self._windows.remove(window)
        self._swa_evictable_size -= len(window)
        window.node.window = None
        return window.swa_indices

    # eviction

    def evict(self, num_tokens: int, swa_num_tokens: int = 0) -> EvictResult:
        """Free at least so many tokens of each pool, or all that is unlocked.

        Unlocked leaves go first, in the order of the policy, with both kinds of slots; so do tombstones that become
        unlocked leaves thereby. If windows are still short, the least recently used go: of a leaf that nobody locks
        together with the leaf, otherwise alone.

        Complexity: O(log n) per dropped node or window plus O(tokens freed).
        """
        freed: list[SlotArray] = []
        swa_freed: list[SlotArray] = []
        num_freed = num_swa_freed = 0
        while (num_freed < num_tokens and self._queue) or (num_swa_freed < swa_num_tokens and self._windows):
            if num_freed < num_tokens and self._queue:
                parts, swa_parts = self._drop(self._queue.pop())
            else:
                parts, swa_parts = self._evict_window()
            num_freed += sum(map(len, parts))
            num_swa_freed += sum(map(len, swa_parts))
            freed += parts
            swa_freed += swa_parts
        return EvictResult(join_slots(freed), join_slots(swa_freed))

    def _evict_window(self) -> tuple[list[SlotArray], list[SlotArray]]:
        window = next(iter(self._windows))
        node = window.node
        if not node.children and not node.lock_ref:
            self._queue.remove(node)
            return self._drop(node)
        return [], [self._entomb(window)]

    def _drop(self, leaf: SWANode) -> tuple[list[SlotArray], list[SlotArray]]:
        """Drop an unlocked, unqueued leaf and the tombstones above that become unlocked leaves; returns their slots."""
        freed: list[SlotArray] = []
        swa_freed: list[SlotArray] = []
        node = leaf
        while True:
            if node.window is not None:
                swa_freed.append(self._entomb(node.window))
            freed.append(node.kv_indices)
            self._evictable_size -= len(node)
            if self._events is not None:
                self._events.removed(node)
            parent = self._tree.remove_leaf(node)
            parent.learn_from(node)
            if parent.children or parent.lock_ref:
                return freed, swa_freed
            if parent.window is not None:
                self._queue.add(parent)
                return freed, swa_freed
            node = parent

    def reset(self) -> SlotArray:
        """Forget everything; returns the full-attention slots. `reset_both` returns those of both pools."""
        return self.reset_both().freed

    def reset_both(self) -> EvictResult:
        """Forget everything, locked or not, and return every slot of both pools for the caller to free."""
        windows = [node.window.swa_indices for node in self._tree.root.subtree() if node.window is not None]
        self._windows.clear()
        self._swa_evictable_size = self._swa_protected_size = 0
        return EvictResult(super().reset(), join_slots(windows))

    # requests

    def cache_unfinished_req(self, req: CacheRequest) -> EvictResult:
        """Store what `req` has computed so far; see `swa_lifecycle.store_unfinished`."""
        return store_unfinished(self, req)

    def cache_finished_req(self, req: CacheRequest, *, is_insert: bool = True) -> EvictResult:
        """Store what `req` has computed, release it and return what the caller frees."""
        return store_finished(self, req, is_insert=is_insert)

    def advance_window(self, req: CacheRequest) -> EvictResult:
        """Free what a running request's windows have left behind; see `swa_lifecycle.advance_window`."""
        return advance_window(self, req)

    def swa_path_slots(self, handle: PrefixHandle, start: int = 0) -> SlotArray:
        """Sliding-window slots of positions `[start, end)` of a stored prefix, -1 where they are gone."""
        parts: list[SlotArray] = []
        step: SWANode | None = self._tree.resolve(handle)
        while step is not None and step.end > start:
            slots = np.full(len(step), -1) if step.window is None else step.window.swa_indices
            parts.append(slots[max(start - step.start, 0) :])
            step = step.parent
        return join_slots(parts[::-1])

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

    def check(self) -> None:
        """Verify every invariant; for tests and idle time.

        Raises:
            CorruptCacheError: The first one that does not hold.
        """
        super().check()
        self._windows.check()
        sizes = check_hybrid_tree(self._tree.root, set(self._windows), unique_slots=not self._simulated)
        if sizes != (self._swa_evictable_size, self._swa_protected_size):
            counted = (self._swa_evictable_size, self._swa_protected_size)
            raise CorruptCacheError(f"evictable and protected window tokens are {sizes}, counted as {counted}")


__all__ = ["SWAInsertResult", "SWAMatchResult", "SWARadixCache"]
