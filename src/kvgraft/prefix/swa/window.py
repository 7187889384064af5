"""The windows of a tree, the receipts of its locks, and what its lookups and inserts return."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.prefix.component.node import Component, ComponentLock, ComponentNode
from kvgraft.prefix.radix.invariants import require, require_owned, require_unique
from kvgraft.prefix.radix.node import frozen_copy
from kvgraft.prefix.results import NO_SLOTS, InsertResult, MatchResult, SlotArray, join_slots

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgraft.prefix.eviction.policies import EvictionKey


class Window(Component):
    """The sliding-window KV of one node.

    Attributes:
        swa_indices: Read-only int64, one slot of the sliding-window pool per element of the node; owned.
    """

    __slots__ = ("swa_indices",)

    def __init__(self, node: ComponentNode[Window], swa_indices: SlotArray, now: int) -> None:
        super().__init__(node, now)
        self.swa_indices = frozen_copy(swa_indices)

    def __len__(self) -> int:
        return len(self.swa_indices)

    def divide(self, upper: ComponentNode[Window]) -> Window:
        """Keep what is of the own node, after `upper` was cut off; returns the rest. Both have the same receipts."""
        slots, cut = self.swa_indices, len(upper)
        above = Window(upper, slots[:cut], self.last_access)
        above.lock_ref = self.lock_ref
        self.swa_indices = frozen_copy(slots[cut:])
        return above


def window_order(window: Window) -> EvictionKey:
    """Least recently used first; of one access the one nearest to the root.

    All windows that one access needs share its time. So when the first of them goes and the branch cannot be matched
    any more, the rest of it goes next, before whole windows of other branches (SGLang #35515).
    """
    return (window.last_access, window.node.end)


class SWALock(ComponentLock):
    """Receipt of a lock on a hybrid tree: covers windows of whole nodes, upwards until all that a prefix needs is covered."""

    __slots__ = ()

    @property
    def swa_start(self) -> int:
        """Position at which the covered window begins."""
        return self.start

    @property
    def swa_released(self) -> bool:
        """Whether the window was released, early or with the lock."""
        return self.gave_back


class SWAMatchResult(MatchResult):
    """A match with the slots of both pools."""

    __slots__ = ("_path",)

    def __init__(self, path: list[ComponentNode[Window]], handle: ComponentNode[Window]) -> None:
        super().__init__([node.kv_indices for node in path], handle.end, handle)
        self._path = [(len(node), None if node.component is None else node.component.swa_indices) for node in path]

    @property
    def swa_indices(self) -> SlotArray:
        """Int64 `(prefix_len,)` slots of the sliding-window pool, -1 where they are gone. Complexity: O(prefix_len)."""
        return join_slots([np.full(length, -1) if slots is None else slots for length, slots in self._path])


@dataclass(frozen=True, slots=True, eq=False)
class SWAInsertResult(InsertResult):
    """The offered slots that the cache took, and those that are duplicates."""

    freed: SlotArray = field(default_factory=lambda: NO_SLOTS)
    """Offered full-attention slots of `[prev_prefix_len, prefix_len)`: the cache keeps its own."""
    swa_freed: SlotArray = field(default_factory=lambda: NO_SLOTS)
    """Offered sliding-window slots there that healed no tombstone."""


def check_windows(root: ComponentNode[Window], windows: Sequence[Window], *, unique_slots: bool) -> None:
    """Verify the slots of the windows of a tree, twice in a namespace none if they are unique, and their locks.

    Raises:
        CorruptCacheError: The first invariant that does not hold.
    """
    for window in windows:
        require(len(window) == len(window.node), "a window has not one slot per token")
        require_owned(window.swa_indices)
    if unique_slots:
        require_unique((window.node, window.swa_indices) for window in windows)
    full_locks: dict[ComponentNode[Window], int] = {}
    for node in list(root.subtree())[:0:-1]:
        full_locks[node] = node.handle_locks + sum(full_locks[child] for child in node.children.values())
        if node.component is not None:
            require(0 <= node.component.lock_ref <= full_locks[node], "a window has more locks than its node")
