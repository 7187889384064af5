"""Node of a hybrid tree: full-attention slots as in any radix tree, and a sliding-window component that may be gone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.prefix.component.node import Component, ComponentLock, ComponentNode
from kvgraft.prefix.radix.node import frozen_copy

if TYPE_CHECKING:
    from typing import Self

    from kvgraft.prefix.results import SlotArray


class Window(Component):
    """The sliding-window KV of one node.

    Attributes:
        swa_indices: Read-only int64, one slot of the sliding-window pool per element of the node; owned.
    """

    __slots__ = ("swa_indices",)

    node: SWANode

    def __init__(self, node: SWANode, swa_indices: SlotArray, now: int) -> None:
        super().__init__(now)
        self.node = node
        self.swa_indices = frozen_copy(swa_indices)

    def __len__(self) -> int:
        return len(self.swa_indices)


class SWANode(ComponentNode[Window]):
    """A node with an optional window."""

    __slots__ = ()

    def divide(self, length: int, now: int, page_size: int) -> Self:
        """Cut as any node; a window is cut too, and both halves are covered by the receipts that covered it."""
        upper = super().divide(length, now, page_size)
        if self.component is not None:
            slots = self.component.swa_indices
            upper.component = Window(upper, slots[:length], self.component.last_access)
            upper.component.lock_ref = self.component.lock_ref
            self.component.swa_indices = frozen_copy(slots[length:])
        return upper


class SWALock(ComponentLock):
    """Receipt of a lock on a hybrid tree.

    The window lock covers whole nodes upwards until all that the prefix needs is covered. Its upper border is kept
    as a position in the sequence, which no split can move; a border kept as a node would have to follow splits.

    Attributes:
        swa_start: Position at which the covered window begins.
        swa_released: Whether the window was released early.
    """

    __slots__ = ("swa_released", "swa_start")

    def __init__(self, node: SWANode, swa_start: int) -> None:
        super().__init__(node)
        self.swa_start = swa_start
        self.swa_released = False
