"""Lookup, locks and eviction of a tree with nodes that may have a state."""

from __future__ import annotations

from math import lcm
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.errors import ConfigError, CorruptCacheError
from kvgraft.prefix.component.base import BaseComponentCache
from kvgraft.prefix.results import (
    EvictResult,
    MatchPrefixParams,
    PrefixHandle,
    SlotArray,
    StoredLength,
    join_slots,
)
from kvgraft.prefix.ssm.invariants import check_states
from kvgraft.prefix.ssm.node import State, StateLock, StateNode
from kvgraft.prefix.ssm.results import StateMatchResult
from kvgraft.prefix.ssm.states import TreeStates
from kvgraft.token_key import RadixKey

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Unpack

    from kvgraft.prefix.radix.base import TreeOptions


class BaseStateCache(BaseComponentCache[StateNode, State, StateLock]):
    """Base of `StateRadixCache`: all but inserts and requests.

    Invariants (verified by `check`), besides those of a tree over two pools:
        - A state lies at the end of a node, at a multiple of `state_alignment`; no slot of either pool is stored twice.
        - Receipts that hold a state never exceed the locks on its node.
    """

    _node_class = StateNode
    _lock_class = StateLock
    _states_class = TreeStates
    _components: TreeStates

    def __init__(
        self,
        page_size: int = 1,
        *,
        state_chunk_size: int = 1,
        simulated: bool = False,
        **options: Unpack[TreeOptions],
    ) -> None:
        """Make an empty cache.

        Args:
            page_size: Tokens per page.
            state_chunk_size: Tokens per chunk of the model's linear attention, 64 as a rule: states are recorded at ends of
                chunks alone, so that what follows one is computed in the same chunks as without it. 1 records anywhere.
            simulated: Without pools: an insert without slots takes the token ids as slots; slots and states may repeat.
            options: As of `BaseRadixCache`; the policy orders leaves, and states on their own.
        """
        if state_chunk_size < 1:
            raise ConfigError(f"state_chunk_size must be at least 1, not {state_chunk_size}")
        super().__init__(page_size, simulated=simulated, **options)
        self._state_chunk_size = state_chunk_size
        self._alignment = lcm(page_size, state_chunk_size)
        self._components = self._states_class(self.policy)

    @property
    def state_chunk_size(self) -> int:
        """Tokens per chunk of the model's linear attention."""
        return self._state_chunk_size

    @property
    def state_alignment(self) -> int:
        """States are recorded at multiples of this many tokens: at ends of pages that are ends of chunks."""
        return self._alignment

    @property
    def state_evictable_size(self) -> int:
        """States that no lock holds."""
        return self._components.evictable_size

    @property
    def state_protected_size(self) -> int:
        """States under at least one lock."""
        return self._components.protected_size

    @property
    def state_total_size(self) -> int:
        """States that are recorded."""
        return self._components.total_size

    # lookup

    def match_prefix(self, params: MatchPrefixParams | RadixKey) -> StateMatchResult:
        """Find the deepest recorded state on the path of a key, and how far the tokens alone would have reached.

        Marks the path up to it and the state itself as used now, and no state above it. Changes no node.
        """
        return self._match_prefix_exact(params if isinstance(params, RadixKey) else params.key)

    def _match_prefix_exact(self, key: RadixKey) -> StateMatchResult:
        root = self._tree.root
        if self._disabled:
            return StateMatchResult([], root, 0)
        path, branching_len = self._descend(key)
        while path and path[-1].component is None:
            path.pop()
        self._mark(path)
        return StateMatchResult(path, path[-1] if path else root, branching_len)

    def _descend(self, key: RadixKey) -> tuple[list[StateNode], int]:
        """Return the nodes that a key has in full, and how far its tokens reach in whole pages and chunks."""
        path, partial, run = self._tree.descend(key, self._tree.root, key.aligned_len(self._page_size))
        reached = path[-1].end if path else 0
        if partial is not None:
            reached = partial.start + run
        return path, reached - reached % self._alignment

    def _mark(self, path: list[StateNode]) -> None:
        now = self._tree.tick()
        if not path:
            return
        last = path[-1]
        assert last.component is not None, "a match ends at a state"
        last.last_access = now
        self._requeue(last)
        self._components.touch(last.component, now)

    def _stored_in(self, path: list[StateNode], stop: int) -> StoredLength:
        ends = (node.end for node in path if node.component is not None and node.end <= stop)
        return StoredLength(max(ends, default=0))

    def _divide(self, node: StateNode, length: int) -> StateNode:
        upper = super()._divide(node, length)
        if node.component is not None:
            self._components.requeue(node.component)  # a policy may look at where its node begins
        return upper

    def state_of(self, handle: PrefixHandle) -> int | None:
        """Slot of the state at the end of a stored prefix; None without one.

        Raises:
            CorruptCacheError: The handle is of a dropped prefix or of another cache.
        """
        state = self._tree.resolve(handle.node if isinstance(handle, StateLock) else handle).component
        return None if state is None else state.slot

    # locks

    def inc_lock_ref(self, handle: PrefixHandle) -> StateLock:
        """Keep a prefix from eviction, and the state at its end; returns the receipt.

        Raises:
            CorruptCacheError: The handle is of a dropped prefix or of another cache, or its state was evicted since.
        """
        node = self._tree.resolve(handle)
        if node.component is None and node.parent is not None:
            raise CorruptCacheError("the state of this prefix was evicted: match again")
        lock = self._lock(node)
        if node.component is not None:
            node.component.hit_count += 1  # held now, so it waits in no queue
        return lock

    def _lock(self, node: StateNode) -> StateLock:
        super().inc_lock_ref(node)
        if node.component is not None:
            self._components.lock(node.component)
        return StateLock(node, state_locked=node.component is not None)

    def _unlock_components(self, lock: StateLock) -> None:
        if lock.state_locked:
            self.dec_state_lock_only(lock)

    def dec_state_lock_only(self, handle: PrefixHandle) -> None:
        """Give the lock on the state back early, once it was copied; the tokens stay locked.

        The state stays for other requests, and may be evicted.

        Raises:
            CorruptCacheError: The receipt holds no state, or not any more. Nothing has changed then.
        """
        lock = self._open_lock(handle)
        state = lock.node.component
        if not lock.state_locked or state is None:
            raise CorruptCacheError("this lock holds no state, or its state was released before")
        self._components.unlock(state)
        lock.state_locked = False

    # eviction

    def evict(self, num_tokens: int, num_states: int = 0) -> EvictResult:
        """Free at least so many tokens and states, or all that is unlocked.

        Unlocked leaves go first, in the order of the policy, with their states; so do nodes without a state that become
        unlocked leaves thereby. If states are still short, they go in an order of their own: that of an unlocked leaf
        together with the leaf, any other alone.

        Complexity: O(log n) per dropped node or state plus O(tokens freed).
        """
        return self._evict_both(num_tokens, num_states)

    def _freed(self, slots: list[SlotArray], components: Sequence[State]) -> EvictResult:
        return EvictResult(
            join_slots(slots), state_freed=np.array([state.slot for state in components], dtype=np.int64)
        )

    def _check_kind(self) -> None:
        check_states(self._tree.root, self._alignment, unique_slots=not self._simulated)
