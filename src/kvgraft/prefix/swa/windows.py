"""The windows of a tree: how many tokens they hold, which of them can leave, and in which order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.errors import CorruptCacheError
from kvgraft.prefix.eviction.queue import EvictionQueue
from kvgraft.prefix.swa.invariants import check_hybrid_tree
from kvgraft.prefix.swa.node import SWANode, Window

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvgraft.prefix.eviction.policies import EvictionKey
    from kvgraft.prefix.results import SlotArray
    from kvgraft.windows import WindowKind


def _window_order(window: Window) -> EvictionKey:
    """Least recently used first; of one access the one nearest to the root.

    All windows that one access needs share its time. So when the first of them goes and the branch cannot be matched
    any more, the rest of it goes next, before whole windows of other branches (SGLang #35515).
    """
    return (window.last_access, window.node.end)


class TreeWindows:
    """Covers, uncovers, refreshes and frees the windows of one tree; knows nothing of full attention.

    Invariants (verified by `check`):
        - The queue holds the windows that no receipt covers and nothing else.
        - `evictable_size` and `protected_size` are the tokens of uncovered and covered windows.

    Attributes:
        evictable_size: Tokens of windows that no lock covers.
        protected_size: Tokens of windows under at least one lock.
    """

    def __init__(self, kind: WindowKind) -> None:
        self.evictable_size = 0
        self.protected_size = 0
        self._kind = kind
        self._queue: EvictionQueue[Window] = EvictionQueue(_window_order)

    def __len__(self) -> int:
        """Windows that can leave."""
        return len(self._queue)

    def oldest(self) -> Window:
        """The window that leaves next; there is one."""
        return self._queue.first()

    def attach(self, node: SWANode, swa_indices: SlotArray, now: int) -> None:
        """Give a node a window, used now and not covered; the slots are copied."""
        node.window = Window(node, swa_indices, now)
        self.evictable_size += len(node)
        self._queue.add(node.window)

    def divided(self, upper: SWANode, lower: SWANode) -> None:
        """Take in that a node was cut; both halves of an uncovered window wait now."""
        if upper.window is not None and lower.window is not None and not upper.window.lock_ref:
            self._queue.add(upper.window)
            self._queue.update(lower.window)

    def touch(self, node: SWANode, now: int) -> None:
        """Mark windows as used now, upwards from `node`, until all that a prefix needs is covered."""
        for step in self.reach(node):
            window = step.window
            assert window is not None, "only live windows are reached"
            window.last_access = now
            if window.queue_index >= 0:
                self._queue.update(window)

    def reach(self, node: SWANode) -> list[SWANode]:
        """Nodes whose windows a lock on `node` covers, upwards, ending before a tombstone."""
        reached: list[SWANode] = []
        step, first = node, self._kind.first_needed(node.end)
        while step.end > first and step.window is not None and step.parent is not None:
            reached.append(step)
            step = step.parent
        return reached

    def cover(self, nodes: Iterable[SWANode]) -> None:
        """Keep the windows of `nodes` for one receipt more."""
        for node in nodes:
            window = node.window
            assert window is not None, "only live windows are covered"
            window.lock_ref += 1
            if window.lock_ref == 1:
                self.evictable_size -= len(window)
                self.protected_size += len(window)
                self._queue.remove(window)

    def uncover(self, node: SWANode, swa_start: int) -> list[Window]:
        """Give back a receipt that covers `[swa_start, node.end)`; returns the windows that none covers any more."""
        uncovered: list[Window] = []
        step = node
        while step.start >= swa_start and step.parent is not None:
            window = step.window
            assert window is not None, "a covered window is never freed"
            window.lock_ref -= 1
            if not window.lock_ref:
                self.evictable_size += len(window)
                self.protected_size -= len(window)
                self._queue.add(window)
                uncovered.append(window)
            step = step.parent
        return uncovered

    def free(self, window: Window) -> SlotArray:
        """Take an uncovered window from its node, which becomes a tombstone; returns the slots."""
        self._queue.remove(window)
        self.evictable_size -= len(window)
        window.node.window = None
        return window.swa_indices

    def clear(self) -> None:
        """Forget all windows, covered or not, of nodes that the tree has dropped."""
        self._queue.clear()
        self.evictable_size = self.protected_size = 0

    def check(self, root: SWANode, *, unique_slots: bool) -> None:
        """Verify every invariant of the windows below `root`; raises `CorruptCacheError`."""
        self._queue.check()
        sizes = check_hybrid_tree(root, set(self._queue), unique_slots=unique_slots)
        counted = (self.evictable_size, self.protected_size)
        if sizes != counted:
            raise CorruptCacheError(f"evictable and protected window tokens are {sizes}, counted as {counted}")
