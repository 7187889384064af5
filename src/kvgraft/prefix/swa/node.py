"""Node of a hybrid tree: full-attention slots as in any radix tree, and a sliding-window component that may be gone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.prefix.eviction.queue import Queueable
from kvgraft.prefix.radix.node import RadixNode, frozen_copy
from kvgraft.prefix.results import PrefixHandle, SlotArray

if TYPE_CHECKING:
    from typing import Self


class Window(Queueable):
    """The sliding-window KV of one node.

    Attributes:
        node: The node.
        swa_indices: Read-only int64, one slot of the sliding-window pool per element of the node; owned.
        lock_ref: Receipts that cover this window.
        last_access: Time of the last match or insert with a window that reached it.
    """

    __slots__ = ("last_access", "lock_ref", "node", "swa_indices")

    def __init__(self, node: SWANode, swa_indices: SlotArray, now: int) -> None:
        super().__init__()
        self.node = node
        self.swa_indices = frozen_copy(swa_indices)
        self.lock_ref = 0
        self.last_access = now

    def __len__(self) -> int:
        return len(self.swa_indices)


class SWANode(RadixNode):
    """A node with an optional window.

    Attributes:
        window: None for a tombstone: the full-attention KV is there, the sliding-window KV is freed.
    """

    __slots__ = ("window",)

    def __init__(self, *args: object, **fields: object) -> None:
        super().__init__(*args, **fields)  # type: ignore[arg-type]
        self.window: Window | None = None

    def divide(self, length: int, now: int, page_size: int) -> Self:
        """Cut as any node; a window is cut too, and both halves are covered by the receipts that covered it."""
        upper = super().divide(length, now, page_size)
        if self.window is not None:
            slots = self.window.swa_indices
            upper.window = Window(upper, slots[:length], self.window.last_access)
            upper.window.lock_ref = self.window.lock_ref
            self.window.swa_indices = frozen_copy(slots[length:])
        return upper

    def detach(self) -> None:
        """Let a dropped node hold nothing; also breaks the cycle between node and window."""
        super().detach()
        self.window = None


class SWALock(PrefixHandle):
    """Receipt of a lock on a hybrid tree.

    The window lock covers whole nodes upwards until all that the prefix needs is covered. Its upper border is kept
    as a position in the sequence, which no split can move; a border kept as a node would have to follow splits.

    Attributes:
        node: The locked prefix.
        swa_start: Position at which the covered window begins.
        swa_released: Whether the window was released early.
        released: Whether the whole lock was given back.
    """

    __slots__ = ("node", "released", "swa_released", "swa_start")

    def __init__(self, node: SWANode, swa_start: int) -> None:
        self.node = node
        self.swa_start = swa_start
        self.swa_released = False
        self.released = False
