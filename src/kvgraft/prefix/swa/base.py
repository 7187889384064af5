"""Lookup, locks and eviction of a tree with nodes that own slots of two pools."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvgraft.errors import CorruptCacheError
from kvgraft.prefix.component.base import BaseComponentCache
from kvgraft.prefix.results import (
    NO_SLOTS,
    EvictResult,
    MatchPrefixParams,
    PrefixHandle,
    SlotArray,
    StoredLength,
    join_slots,
)
from kvgraft.prefix.swa.invariants import check_windows
from kvgraft.prefix.swa.node import SWALock, SWANode, Window
from kvgraft.prefix.swa.results import SWAMatchResult
from kvgraft.prefix.swa.windows import TreeWindows
from kvgraft.token_key import RadixKey
from kvgraft.windows import window_kind

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Unpack

    from kvgraft.prefix.radix.base import TreeOptions


class BaseSWACache(BaseComponentCache[SWANode, Window, SWALock]):
    """Base of `SWARadixCache`: all but inserts and requests.

    Attributes:
        window: What rows of window layers read.

    Invariants (verified by `check`), besides those of a tree over two pools:
        - A window has one slot per element of its node; no slot of either pool is stored twice.
        - Receipts that cover a window never exceed the locks on or below its node (`full_lock_ref >= swa_lock_ref`).
    """

    _node_class = SWANode
    _lock_class = SWALock
    _components: TreeWindows

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
        self._components = TreeWindows(window)

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

    def match_prefix(self, params: MatchPrefixParams | RadixKey) -> SWAMatchResult:
        """Find the deepest page boundary from which a model can go on.

        That is the deepest one with a run of live windows, going up, that covers what the kind of window needs or reaches the
        root; at the border of a chunk that is nothing. Marks the accepted path as used now; windows only as deep as one
        window reaches, so that dead ones age.
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
        self._components.touch(last, now)
        if last.queue_index >= 0:
            self._queue.update(last)
        return SWAMatchResult(path, last)

    def _accepted_path(self, key: RadixKey) -> list[SWANode]:
        path, partial, run = self._tree.descend(key, self._tree.root, key.aligned_len(self._page_size))
        if partial is not None:
            path.append(partial)
        stop = partial.start + run if partial is not None else path[-1].end if path else 0
        return self._cut_path(path, self._stored_in(path, stop).prefix_len)

    def _stored_in(self, path: list[SWANode], stop: int) -> StoredLength:
        live_start = accepted = 0
        for node in path:
            end = min(node.end, stop)
            if node.component is None:
                live_start = end
                accepted = max(accepted, self.window.boundary(end, self._page_size))
            elif self.window.first_needed(end) >= live_start:
                accepted = end
        return StoredLength(accepted)

    def _cut_path(self, path: list[SWANode], length: int) -> list[SWANode]:
        """The nodes of `path` up to position `length`, the last one cut there."""
        kept = [node for node in path if node.start < length]
        if kept and kept[-1].end > length:
            kept[-1] = self._divide(kept[-1], length - kept[-1].start)
        return kept

    def _divide(self, node: SWANode, length: int) -> SWANode:
        upper = super()._divide(node, length)
        self._components.divided(upper, node)
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

    # locks

    def inc_lock_ref(self, handle: PrefixHandle) -> SWALock:
        """Keep a prefix from eviction, and its last window; returns the receipt.

        Raises:
            CorruptCacheError: The handle is of a dropped prefix or of another cache, or its window was evicted since.
        """
        node = self._tree.resolve(handle)
        covered = self._components.reach(node)
        if _start_of(covered, node) > self.window.first_needed(node.end):
            raise CorruptCacheError("the window of this prefix was evicted: match again")
        return self._lock(node, covered)

    def _lock(self, node: SWANode, covered: list[SWANode]) -> SWALock:
        super().inc_lock_ref(node)
        self._components.cover(covered)
        return SWALock(node, _start_of(covered, node))

    def _unlock_components(self, lock: SWALock) -> None:
        if not lock.swa_released:
            self._components.uncover(lock.node, lock.swa_start)

    def dec_swa_lock_only(self, handle: PrefixHandle) -> EvictResult:
        """Release the window of a lock early, when decoding has passed it; full attention stays locked.

        Windows inside the tree become evictable; that of a leaf is freed now and the leaf becomes a tombstone.

        Raises:
            CorruptCacheError: The receipt's window was released before. Nothing has changed then.
        """
        lock = self._open_lock(handle)
        if lock.swa_released:
            raise CorruptCacheError("the window of this lock was released before")
        uncovered = self._components.uncover(lock.node, lock.swa_start)
        lock.swa_released = True
        freed = [self._components.free(window).swa_indices for window in uncovered if not window.node.children]
        return EvictResult(NO_SLOTS, join_slots(freed))

    # eviction

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

    def _check_kind(self) -> None:
        check_windows(self._tree.root, unique_slots=not self._simulated)


def _start_of(covered: list[SWANode], node: SWANode) -> int:
    """Return where the windows begin that a lock on `node` covers, nodes upwards; its end if there are none."""
    return covered[-1].start if covered else node.end
