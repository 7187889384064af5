"""Nodes that may hold something besides the slots of their tokens, and may lie on the device, on the host, or on both."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kvgraft.prefix.eviction.queue import Queueable
from kvgraft.prefix.radix.node import RadixNode, frozen_copy
from kvgraft.prefix.results import NO_SLOTS, PrefixHandle, SlotArray

if TYPE_CHECKING:
    from typing import Self


class Component(Queueable):
    """What one node has besides the slots of its tokens: a window, or a state.

    Attributes:
        node: The node.
        lock_ref: Receipts that hold it.
        last_access: Time at which it was made or used last.
    """

    __slots__ = ("last_access", "lock_ref", "node")

    def __init__(self, node: ComponentNode[Any], now: int) -> None:
        super().__init__()
        self.node = node
        self.lock_ref = 0
        self.last_access = now

    @abstractmethod
    def __len__(self) -> int:
        """What it counts for in its pool."""


Part = TypeVar("Part", bound=Component)


class ComponentNode(RadixNode, Generic[Part]):
    """A node with an optional component; in trees of two tiers each of both lies on the device, on the host, or on both.

    Attributes:
        component: On the device; None for a tombstone: the slots of its tokens are there, and what belongs to them is freed.
        host_component: The component with a copy on the host, the same object where it lies on both; None without.
        host_indices: Read-only host slots, one per element; empty without a copy.
        host_locks: Load-backs that read the copy.
        device_children: Of a tree of two tiers: children with slots on the device.
        length: Elements, wherever they lie.
    """

    __slots__ = ("component", "device_children", "host_component", "host_indices", "host_locks", "length")

    def __init__(self, *args: object, **fields: object) -> None:
        super().__init__(*args, **fields)  # type: ignore[arg-type]
        self.component: Part | None = None
        self.host_component: Part | None = None
        self.host_indices: SlotArray = NO_SLOTS
        self.host_locks = self.device_children = 0
        self.length = len(self.kv_indices)

    def __len__(self) -> int:
        return self.length

    @property
    def on_device(self) -> bool:
        """Whether its slots lie on the device."""
        return len(self.kv_indices) > 0

    @property
    def on_host(self) -> bool:
        """Whether there is a copy of them on the host."""
        return len(self.host_indices) > 0

    def divide(self, length: int, now: int, page_size: int) -> Self:
        """Cut as any node, in both tiers; components stay with the lower part."""
        upper = super().divide(length, now, page_size)
        upper.length, self.length = length, self.length - length
        upper.host_locks = self.host_locks
        upper.device_children = int(self.on_device)
        if self.on_host:
            upper.host_indices = frozen_copy(self.host_indices[:length])
            self.host_indices = frozen_copy(self.host_indices[length:])
        return upper

    def detach(self) -> None:
        """Let a dropped node hold nothing; also breaks the cycle between node and component."""
        super().detach()
        self.component = self.host_component = None
        self.host_indices = NO_SLOTS
        self.length = 0


class ComponentLock(PrefixHandle):
    """Receipt of a lock on a tree with components, which holds those of `[start, node.end)`.

    The border is kept as a position in the sequence, which no split can move; as a node it would have to follow splits.

    Attributes:
        node: The locked prefix.
        start: Where the components begin that it holds; the end of the prefix where it holds none.
        gave_back: Whether they were given back, early or with the lock.
        released: Whether the lock was given back.
    """

    __slots__ = ("gave_back", "node", "released", "start")

    def __init__(self, node: ComponentNode[Any], start: int) -> None:
        self.node = node
        self.start = start
        self.gave_back = self.released = False
