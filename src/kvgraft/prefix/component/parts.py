"""The components of a tree: how much they count, which of them can leave, and in which order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic

from kvgraft.prefix.component.node import ComponentNode, Part
from kvgraft.prefix.eviction.queue import EvictionQueue
from kvgraft.prefix.radix.invariants import require

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvgraft.prefix.eviction.policies import EvictionKey


class TreeComponents(Generic[Part]):
    """Attaches, locks and frees the components of one tree; knows no tokens.

    Invariants (verified by `check`):
        - The queue holds the components that no receipt holds and nothing else.
        - `evictable_size` and `protected_size` are what components count that no receipt holds and that one does.

    Attributes:
        evictable_size: Of components that no lock holds.
        protected_size: Of components under at least one lock.
    """

    def __init__(self, order: Callable[[Part], EvictionKey]) -> None:
        self.evictable_size = 0
        self.protected_size = 0
        self._queue: EvictionQueue[Part] = EvictionQueue(order)

    def __len__(self) -> int:
        """Components that can leave."""
        return len(self._queue)

    @property
    def total_size(self) -> int:
        """Of all components."""
        return self.evictable_size + self.protected_size

    def oldest(self) -> Part:
        """The component that leaves next; there is one."""
        return self._queue.first()

    def attach(self, node: ComponentNode[Part], component: Part) -> None:
        """Give a tombstone a component that no receipt holds."""
        node.component = component
        self.evictable_size += len(component)
        self._queue.add(component)

    def divided(self, upper: ComponentNode[Part], component: Part) -> None:
        """Take in that a component was cut, and what its node's upper part has of it."""
        upper.component = component
        if not component.lock_ref:
            self._queue.add(component)

    def requeue(self, component: Part) -> None:
        """Restore the order of eviction after a fact about a component changed."""
        if component.queue_index >= 0:
            self._queue.update(component)

    def lock(self, component: Part) -> None:
        """Hold a component for one receipt more."""
        component.lock_ref += 1
        if component.lock_ref == 1:
            self.evictable_size -= len(component)
            self.protected_size += len(component)
            self._queue.remove(component)

    def unlock(self, component: Part) -> None:
        """Give back a receipt."""
        component.lock_ref -= 1
        if not component.lock_ref:
            self.evictable_size += len(component)
            self.protected_size -= len(component)
            self._queue.add(component)

    def free(self, component: Part) -> Part:
        """Take a component that no receipt holds from its node, which becomes a tombstone; returns it."""
        self._queue.remove(component)
        self.evictable_size -= len(component)
        component.node.component = None
        return component

    def clear(self) -> None:
        """Forget all components, locked or not, of nodes that the tree has dropped."""
        self._queue.clear()
        self.evictable_size = self.protected_size = 0

    def rebuild(self) -> None:
        """Forget all components without looking at them."""
        self._queue.rebuild()
        self.evictable_size = self.protected_size = 0

    def check(self, root: ComponentNode[Part]) -> None:
        """Verify every invariant of the components below `root`; raises `CorruptCacheError`."""
        self._queue.check()
        require(root.component is None, "the root has a component")
        components = components_of(root)
        for component in components:
            require(component.node.component is component, "a component belongs to another node")
        unlocked = {component for component in components if not component.lock_ref}
        require(unlocked == set(self._queue), "the queue of components is not the unlocked ones")
        evictable_size = sum(map(len, unlocked))
        sizes = (evictable_size, sum(map(len, components)) - evictable_size)
        counted = (self.evictable_size, self.protected_size)
        require(sizes == counted, f"evictable and protected components are {sizes}, counted as {counted}")


def components_of(root: ComponentNode[Part]) -> list[Part]:
    """Return the components of all nodes below `root`, in the order of the tree."""
    return [node.component for node in root.subtree() if node.component is not None]
