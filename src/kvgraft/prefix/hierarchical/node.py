"""Node of a tree of two tiers: slots on the device, slots on the host, or both."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.prefix.radix.node import RadixNode, frozen_copy
from kvgraft.prefix.results import NO_SLOTS, SlotArray

if TYPE_CHECKING:
    from typing import Self


class TieredNode(RadixNode):
    """A node of any two-tier tree; a class of its own has the slots of these attributes.

    Attributes:
        length: Elements of the node, in either tier.
        host_indices: Read-only host slots, one per element; empty without a copy.
        host_locks: Load-backs that read the copy.
        device_children: Children with KV on the device.
    """

    if not TYPE_CHECKING:  # mypy takes no attribute of a class with slots that has none for it
        __slots__ = ()

    length: int
    host_indices: SlotArray
    host_locks: int
    device_children: int

    def __init__(self, *args: object, **fields: object) -> None:
        super().__init__(*args, **fields)  # type: ignore[arg-type]
        self.length = len(self.kv_indices)
        self.host_indices = NO_SLOTS
        self.host_locks = 0
        self.device_children = 0

    def __len__(self) -> int:
        return self.length

    @property
    def on_device(self) -> bool:
        """Whether the KV lies on the device."""
        return len(self.kv_indices) > 0

    @property
    def on_host(self) -> bool:
        """Whether there is a copy on the host."""
        return len(self.host_indices) > 0

    def divide(self, length: int, now: int, page_size: int) -> Self:
        """Cut as any node, in both tiers."""
        upper = super().divide(length, now, page_size)
        upper.length, self.length = length, self.length - length
        upper.host_locks = self.host_locks
        upper.device_children = int(self.on_device)
        if self.on_host:
            upper.host_indices = frozen_copy(self.host_indices[:length])
            self.host_indices = frozen_copy(self.host_indices[length:])
        return upper

    def detach(self) -> None:
        """Let a dropped node hold nothing."""
        super().detach()
        self.host_indices = NO_SLOTS
        self.length = 0


class HierNode(TieredNode):
    """A node of the two-tier tree of one pool."""

    __slots__ = ("device_children", "host_indices", "host_locks", "length")
