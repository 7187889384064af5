"""Node of a tree over two pools: full-attention slots as in any radix tree, and a component that may be gone."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Generic, TypeVar

from kvgraft.prefix.eviction.queue import Queueable
from kvgraft.prefix.radix.node import RadixNode
from kvgraft.prefix.results import PrefixHandle


class Component(Queueable):
    """What one node has of the second pool.

    Attributes:
        node: The node.
        lock_ref: Receipts that hold it.
        last_access: Time at which it was made or used last.
    """

    __slots__ = ("last_access", "lock_ref", "node")

    node: Any
    """Of the class that goes with the component."""

    def __init__(self, now: int) -> None:
        super().__init__()
        self.lock_ref = 0
        self.last_access = now

    @abstractmethod
    def __len__(self) -> int:
        """What it counts for in its pool."""


Part = TypeVar("Part", bound=Component)


class ComponentNode(RadixNode, Generic[Part]):
    """A node with an optional component.

    Attributes:
        component: None for a tombstone: the slots of its tokens are there, and what the second pool had for them is freed.
    """

    __slots__ = ("component",)

    def __init__(self, *args: object, **fields: object) -> None:
        super().__init__(*args, **fields)  # type: ignore[arg-type]
        self.component: Part | None = None

    def detach(self) -> None:
        """Let a dropped node hold nothing; also breaks the cycle between node and component."""
        super().detach()
        self.component = None


class ComponentLock(PrefixHandle):
    """Receipt of a lock on a tree over two pools.

    Attributes:
        node: The locked prefix.
        released: Whether the lock was given back.
    """

    __slots__ = ("node", "released")

    def __init__(self, node: Any) -> None:  # noqa: ANN401 - of the class that goes with the lock
        self.node = node
        self.released = False
