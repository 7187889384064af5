"""The windows of a tree: how many tokens they hold, which of them can leave, and in which order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.prefix.component.parts import TreeComponents
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


class TreeWindows(TreeComponents[Window]):
    """Covers, uncovers, refreshes and frees the windows of one tree; each counts its tokens."""

    def __init__(self, kind: WindowKind) -> None:
        super().__init__(_window_order)
        self._kind = kind

    def attach(self, node: SWANode, swa_indices: SlotArray, now: int) -> None:
        """Give a node a window, used now and not covered; the slots are copied."""
        self._attach(node, Window(node, swa_indices, now))

    def divided(self, upper: SWANode, lower: SWANode) -> None:
        """Take in that a node was cut; both halves of an uncovered window wait now."""
        if upper.component is not None and lower.component is not None and not upper.component.lock_ref:
            self._queue.add(upper.component)
            self._queue.update(lower.component)

    def touch(self, node: SWANode, now: int) -> None:
        """Mark windows as used now, upwards from `node`, until all that a prefix needs is covered."""
        for step in self.reach(node):
            window = step.component
            assert window is not None, "only live windows are reached"
            window.last_access = now
            if window.queue_index >= 0:  # not `requeue`: most are, and its call would show
                self._queue.update(window)

    def reach(self, node: SWANode) -> list[SWANode]:
        """Nodes whose windows a lock on `node` covers, upwards, ending before a tombstone."""
        reached: list[SWANode] = []
        step, first = node, self._kind.first_needed(node.end)
        while step.end > first and step.component is not None and step.parent is not None:
            reached.append(step)
            step = step.parent
        return reached

    def cover(self, nodes: Iterable[SWANode]) -> None:
        """Keep the windows of `nodes` for one receipt more."""
        for node in nodes:
            assert node.component is not None, "only live windows are covered"
            self.lock(node.component)

    def uncover(self, node: SWANode, swa_start: int) -> list[Window]:
        """Give back a receipt that covers `[swa_start, node.end)`; returns the windows that none covers any more."""
        uncovered: list[Window] = []
        step = node
        while step.start >= swa_start and step.parent is not None:
            window = step.component
            assert window is not None, "a covered window is never freed"
            self.unlock(window)
            if not window.lock_ref:
                uncovered.append(window)
            step = step.parent
        return uncovered
