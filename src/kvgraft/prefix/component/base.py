"""A radix tree with nodes that may have a component besides the slots of their tokens, a window or a state.

    match    the nodes of a key, up to the deepest position from which a request can go on
    lock     the tokens up to the root, and upwards the components that such a request needs
    insert   as in any radix tree; each kind says what it takes of what is offered
    evict    leaves as the policy says, with their components; then components alone, in an order of their own

Where the second pool is still short after leaves have gone, the component of an unlocked leaf takes the leaf along: it would
serve no request without it.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from kvgraft.errors import ConfigError, CorruptCacheError
from kvgraft.prefix.component.node import ComponentLock, ComponentNode, Part
from kvgraft.prefix.component.parts import TreeComponents, components_of
from kvgraft.prefix.radix.base import BaseRadixCache
from kvgraft.prefix.radix.invariants import require
from kvgraft.prefix.results import NOTHING_FREED, MatchPrefixParams, MatchResult, StoredLength
from kvgraft.token_key import RadixKey

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgraft.prefix.results import EvictResult, PrefixHandle, SlotArray
    from kvgraft.prefix.semantic_fallback import SlotCopier
    from kvgraft.substitution import SemanticPrefixProvider

Lock = TypeVar("Lock", bound=ComponentLock)
Match = TypeVar("Match", bound=MatchResult)


class BaseComponentCache(BaseRadixCache[ComponentNode[Part]], Generic[Part, Lock, Match]):
    """Base of caches over two pools.

    Invariants (verified by `check`), besides those of a radix tree:
        - A leaf without a component is locked.
        - Those of `TreeComponents`.
    """

    _node_class = ComponentNode  # type: ignore[assignment] # of the same parts
    _lock_class: type[Lock]
    _components: TreeComponents[Part]
    _kind: ClassVar[str]
    """What a component is, for messages."""

    # lookup

    def match_prefix(self, params: MatchPrefixParams | RadixKey) -> Match:
        """Find the deepest position from which a request can go on, and mark what it needs for that as used now.

        What the kind of component says of positions: `_usable_len`. No component is marked that the request does not need, so
        that those age.
        """
        return self._match_prefix_exact(params if isinstance(params, RadixKey) else params.key)

    def _match_prefix_exact(self, key: RadixKey) -> Match:
        path, stop = ([], 0) if self._disabled else self._descend(key)
        if not path:
            return self._matched(path, stop)
        length = self._usable_len(path, stop)
        if path[-1].end != length:
            self._cut_path(path, length)
        if path:
            now = self._tree.tick()
            last = path[-1]
            last.last_access = now
            if last.queue_index >= 0:
                self._requeue(last)
            self._touch(last, now)
        return self._matched(path, stop)

    @abstractmethod
    def _matched(self, path: list[ComponentNode[Part]], stop: int) -> Match:
        """Return the match of a key that goes on from the end of `path`; its tokens alone are stored up to `stop`."""

    def _stored_in(self, path: list[ComponentNode[Part]], stop: int) -> StoredLength:
        return StoredLength(self._usable_len(path, stop))

    @abstractmethod
    def _usable_len(self, path: list[ComponentNode[Part]], stop: int) -> int:
        """Return from which position a request can go on whose key follows `path` and leaves it at `stop`."""

    def _cut_path(self, path: list[ComponentNode[Part]], length: int) -> None:
        """Leave of `path` what lies before position `length`, the last node cut there."""
        while path and path[-1].start >= length:
            path.pop()
        if path and path[-1].end > length:
            path[-1] = self._divide(path[-1], length - path[-1].start)

    def _touch(self, node: ComponentNode[Part], now: int) -> None:
        """Mark the components as used now that a request needs which goes on from the end of `node`, and no others."""
        for component in self._needed(node)[0]:
            component.last_access = now
            if component.queue_index >= 0:  # most are
                self._components.requeue(component)

    @abstractmethod
    def _needed(self, node: ComponentNode[Part]) -> tuple[list[Part], int]:
        """What a request needs that goes on from the end of `node`, upwards, as far as it is there.

        Returns the components, and the position where they begin: the end of `node` if there are none.
        """

    @abstractmethod
    def _first_needed(self, end: int) -> int:
        """The first position whose component a prefix of `end` tokens needs; `end` itself where it needs none."""

    # locks

    def is_empty_prefix(self, handle: PrefixHandle) -> bool:
        """See `PrefixCache.is_empty_prefix`."""
        return super().is_empty_prefix(handle.node if isinstance(handle, ComponentLock) else handle)

    def inc_lock_ref(self, handle: PrefixHandle) -> Lock:
        """Keep a prefix from eviction, and the components that a request needs which goes on from it; returns the receipt.

        Raises:
            CorruptCacheError: The handle is of a dropped prefix or of another cache, or what it needs was evicted since.
        """
        node = self._tree.resolve(handle)
        needed, start = self._needed(node)
        if start > self._first_needed(node.end):
            raise CorruptCacheError(f"the {self._kind} of this prefix was evicted: match again")
        return self._lock(node, needed, start)

    def lock_inserted(self, handle: PrefixHandle) -> Lock:
        """Lock the prefix of an insert, and as much of what it needs as is there."""
        node = self._tree.resolve(handle)
        return self._lock(node, *self._needed(node))

    def _lock(self, node: ComponentNode[Part], components: Sequence[Part], start: int) -> Lock:
        super().inc_lock_ref(node)
        for component in components:
            self._components.lock(component)
        return self._lock_class(node, start)

    def dec_lock_ref(self, handle: PrefixHandle) -> EvictResult:
        """Give back a lock; returns the slots of tombstone leaves that only the lock kept.

        Raises:
            CorruptCacheError: The receipt is none, was given back before, or is of another cache. Nothing has changed.
        """
        lock = self._open_lock(handle)
        if not lock.gave_back:
            self._give_components_back(lock)
        super().dec_lock_ref(lock.node)
        lock.released = True
        node: ComponentNode[Part] = lock.node
        if node.lock_ref or node.component is not None or not self._is_leaf(node):
            return NOTHING_FREED
        return self._freed(*self._drop(node))

    def _give_components_back(self, lock: Lock) -> list[Part]:
        """Hold the tokens of a lock alone from now on; returns the components that no lock holds any more."""
        lock.gave_back = True
        unlocked: list[Part] = []
        step: ComponentNode[Part] = lock.node
        while step.end > lock.start:
            component = step.component
            assert component is not None, "what a lock holds is never freed"
            self._components.unlock(component)
            if not component.lock_ref:
                unlocked.append(component)
            assert step.parent is not None, "the root ends where no component begins"
            step = step.parent
        return unlocked

    def _open_lock(self, handle: PrefixHandle) -> Lock:
        if not isinstance(handle, self._lock_class) or handle.released:
            raise CorruptCacheError("not a receipt of inc_lock_ref, or given back before")
        self._tree.resolve(handle.node)
        return handle

    def _prefix_of(self, key: RadixKey, after: PrefixHandle) -> ComponentNode[Part]:
        return super()._prefix_of(key, after.node if isinstance(after, ComponentLock) else after)

    def _is_leaf(self, node: ComponentNode[Part]) -> bool:
        """Return whether nothing continues a node."""
        return not node.children

    def _queue_if_candidate(self, node: ComponentNode[Part]) -> None:
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
        while num_freed < num_tokens and self._queue:
            parts, freed = self._drop(self._queue.pop())
            num_freed += sum(map(len, parts))
            slots += parts
            components += freed
        while self._components.evictable_size > size_left and self._components:
            parts, freed = self._evict_component()
            slots += parts
            components += freed
        return self._freed(slots, components)

    def _evict_component(self) -> tuple[list[SlotArray], list[Part]]:
        component = self._components.oldest()
        node: ComponentNode[Part] = component.node
        if self._is_leaf(node) and not node.lock_ref:
            self._queue.remove(node)
            return self._drop(node)
        return [], [self._components.free(component)]

    def _drop(self, leaf: ComponentNode[Part]) -> tuple[list[SlotArray], list[Part]]:
        """Take an unlocked, unqueued leaf out, and the tombstones above that become unlocked leaves thereby."""
        slots: list[SlotArray] = []
        components: list[Part] = []
        node = leaf
        while True:
            component = node.component
            slots.append(node.kv_indices)
            self._evictable_size -= len(node.kv_indices)
            parent = self._take_out(node)
            if component is not None:
                components.append(self._components.free(component))
            if parent.lock_ref or not self._is_leaf(parent):
                return slots, components
            if parent.component is not None:
                self._queue_if_candidate(parent)
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

    def set_semantic_provider(
        self,
        provider: SemanticPrefixProvider | None,
        *,
        copy_slots: SlotCopier | None = None,
        deadline_s: float | None = None,
    ) -> None:
        """Refuse: a window may be gone and a state has read all tokens before it, so there is no donor to copy."""
        if provider is not None:
            raise ConfigError(
                f"{type(self).__name__} takes no semantic provider; use RadixCache for models without {self._kind}s"
            )

    # invariants

    def check(self) -> None:
        """Verify every invariant; for tests and idle time. Raises `CorruptCacheError`."""
        super().check()
        require(all(node.component is not None for node in self._queue), "an unlocked leaf is a tombstone")
        self._check_kind(components_of(self._tree.root))
        self._components.check(self._tree.root)

    @abstractmethod
    def _check_kind(self, components: Sequence[Part]) -> None:
        """Verify what components of this kind promise of their slots and locks."""
