"""Locks and eviction of a tree over two pools: slots of every token, and components of some nodes.

Two orders of eviction. Leaves go as the policy says, with their components. Where the second pool is still short, components
go in an order of their own: that of an unlocked leaf together with the leaf, which would serve no request, any other alone.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kvgraft.errors import CorruptCacheError
from kvgraft.prefix.component.invariants import components_of
from kvgraft.prefix.component.node import ComponentLock, ComponentNode, Part
from kvgraft.prefix.radix.base import BaseRadixCache
from kvgraft.prefix.radix.invariants import require
from kvgraft.prefix.results import NOTHING_FREED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgraft.prefix.component.parts import TreeComponents
    from kvgraft.prefix.results import EvictResult, PrefixHandle, SlotArray
    from kvgraft.token_key import RadixKey

Node = TypeVar("Node", bound=ComponentNode[Any])
Lock = TypeVar("Lock", bound=ComponentLock)


class BaseComponentCache(BaseRadixCache[Node], Generic[Node, Part, Lock]):
    """Base of caches over two pools.

    Invariants (verified by `check`), besides those of a radix tree:
        - A leaf without a component is locked.
        - Those of `TreeComponents`.
    """

    _components: TreeComponents[Part]
    _lock_class: type[Lock]

    # locks

    def is_empty_prefix(self, handle: PrefixHandle) -> bool:
        """See `PrefixCache.is_empty_prefix`."""
        return super().is_empty_prefix(handle.node if isinstance(handle, ComponentLock) else handle)

    def dec_lock_ref(self, handle: PrefixHandle) -> EvictResult:
        """Give back a lock; returns the slots of tombstone leaves that only the lock kept.

        Raises:
            CorruptCacheError: The receipt is none, was given back before, or is of another cache. Nothing has changed.
        """
        lock = self._open_lock(handle)
        self._unlock_components(lock)
        super().dec_lock_ref(lock.node)
        lock.released = True
        node = lock.node
        if node.lock_ref or node.component is not None or not self._is_leaf(node):
            return NOTHING_FREED
        return self._freed(*self._drop(node))

    @abstractmethod
    def _unlock_components(self, lock: Lock) -> None:
        """Give back what a lock holds of the second pool, unless it was given back before."""

    def _open_lock(self, handle: PrefixHandle) -> Lock:
        if not isinstance(handle, self._lock_class) or handle.released:
            raise CorruptCacheError("not a receipt of inc_lock_ref, or given back before")
        self._tree.resolve(handle.node)
        return handle

    def _prefix_of(self, key: RadixKey, after: PrefixHandle | None) -> Node:
        """Return the stored prefix of `key` that `after`, a handle or a receipt, stands for; the root for None."""
        if after is None:
            return self._tree.root
        return self._tree.resolve_prefix(key, after.node if isinstance(after, ComponentLock) else after)

    def _is_leaf(self, node: Node) -> bool:
        """Return whether nothing continues a node."""
        return not node.children

    def _queue_if_candidate(self, node: Node) -> None:
        """Queue an unlocked leaf; a tombstone leaf never waits, it goes with what kept it."""
        if node.component is not None and not node.children and not node.lock_ref:
            self._queue.add(node)

    # eviction

    def _evict_both(self, num_tokens: int, size: int) -> EvictResult:
        """Free at least so many tokens, and components of that size, or all that is unlocked.

        Complexity: O(log n) per dropped node or component plus O(tokens freed).
        """
        slots: list[SlotArray] = []
        components: list[Part] = []
        num_freed, size_left = 0, self._components.evictable_size - size
        while (num_freed < num_tokens and self._queue) or (
            self._components.evictable_size > size_left and self._components
        ):
            if num_freed < num_tokens and self._queue:
                parts, freed = self._drop(self._queue.pop())
            else:
                parts, freed = self._evict_component()
            num_freed += sum(map(len, parts))
            slots += parts
            components += freed
        return self._freed(slots, components)

    def _evict_component(self) -> tuple[list[SlotArray], list[Part]]:
        component = self._components.oldest()
        node = component.node
        if self._is_leaf(node) and not node.lock_ref:
            self._queue.remove(node)
            return self._drop(node)
        return [], [self._components.free(component)]

    def _drop(self, leaf: Node) -> tuple[list[SlotArray], list[Part]]:
        """Drop an unlocked, unqueued leaf and the tombstones above that become unlocked leaves thereby."""
        slots: list[SlotArray] = []
        components: list[Part] = []
        node = leaf
        while True:
            if node.component is not None:
                components.append(self._components.free(node.component))
            slots.append(node.kv_indices)
            self._evictable_size -= len(node)
            if self._events is not None:  # not `_drop_leaf`: its calls would cost a twentieth
                self._events.removed(node)
            parent = self._tree.remove_leaf(node)
            parent.learn_from(node)
            if parent.children or parent.lock_ref:
                return slots, components
            if parent.component is not None:
                self._queue.add(parent)
                return slots, components
            node = parent

    @abstractmethod
    def _freed(self, slots: list[SlotArray], components: Sequence[Part]) -> EvictResult:
        """Return what left as a result: slots of tokens by node, and components."""

    def reset(self) -> SlotArray:
        """Forget everything; returns the slots of tokens. `reset_both` returns those of both pools."""
        return self.reset_both().freed

    def reset_both(self) -> EvictResult:
        """Forget everything, locked or not, and return every slot of both pools for the caller to free."""
        components = components_of(self._tree.root)
        self._components.clear()
        return self._freed([super().reset()], components)

    def rebuild(self) -> None:
        """See `PrefixCache.rebuild`."""
        self._components.rebuild()
        super().rebuild()

    def check(self) -> None:
        """Verify every invariant; for tests and idle time. Raises `CorruptCacheError`."""
        super().check()
        require(all(node.component is not None for node in self._queue), "an unlocked leaf is a tombstone")
        self._check_kind()
        self._components.check(self._tree.root)

    @abstractmethod
    def _check_kind(self) -> None:
        """Verify what components of this kind promise of their slots and locks."""
