"""Prefix cache for hybrid models with state-space or linear-attention layers: token slots and states over one radix tree.

Such layers keep one state of fixed size for a text of any length, and overwrite it with every token. So a prefix can
be gone on from only where its state was kept. A node always has the slots of its tokens, for the attention layers; at its end
it has a state or not (a tombstone). States are numbers of slots in the owner's pool; the owner copies them on write.

Source: the behaviour follows SGLang's MambaRadixCache (pull request #11214 and its fixes). Departures, with reasons in
docs/design/prefix-cache.md: a match cuts nothing; the state of a lock can be given back early; a match refreshes its own
state only; what a lock alone kept leaves with it; candidates wait in queues.
"""

from __future__ import annotations

from math import lcm
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.errors import ConfigError, CorruptCacheError
from kvgraft.prefix.component.base import BaseComponentCache
from kvgraft.prefix.component.parts import TreeComponents
from kvgraft.prefix.lifecycle import StoredRow
from kvgraft.prefix.radix.invariants import require
from kvgraft.prefix.results import (
    NO_SLOTS,
    EvictResult,
    PrefixHandle,
    SlotArray,
    join_slots,
)
from kvgraft.prefix.ssm.state import State, StateInsertResult, StateLock, StateMatchResult, state_order

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Unpack

    from kvgraft.prefix.component.node import ComponentNode
    from kvgraft.prefix.radix.base import TreeOptions
    from kvgraft.prefix.request import RequestRow
    from kvgraft.token_key import RadixKey

    StateNode = ComponentNode[State]

NO_STATES: Mapping[int, int] = MappingProxyType({})


class StateRadixCache(BaseComponentCache[State, StateLock, StateMatchResult]):
    """A radix tree with nodes that own slots of tokens and, some of them, a state. Not thread-safe.

    Invariants (verified by `check`), besides those of a tree over two pools:
        - A state lies at the end of a node, at a multiple of `state_alignment`; no slot of either pool is stored twice.
        - Receipts that hold a state never exceed the locks on its node.
    """

    _lock_class = StateLock
    _kind = "state"

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
        self._components = TreeComponents(state_order(self.policy))

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

    def _matched(self, path: list[StateNode], stop: int) -> StateMatchResult:
        return StateMatchResult(path, path[-1] if path else self._tree.root, stop - stop % self._alignment)

    def _usable_len(self, path: list[StateNode], stop: int) -> int:
        """Return where the deepest recorded state is: a match ends at the end of a node, and cuts none."""
        for node in reversed(path):
            if node.component is not None and node.end <= stop:
                return node.end
        return 0

    def _touch(self, node: StateNode, now: int) -> None:
        state = node.component
        if state is not None:
            state.last_access = now
            self._components.requeue(state)

    def _needed(self, node: StateNode) -> tuple[list[State], int]:
        """The state at the end of a node alone, which is of the last position before it."""
        return ([], node.end) if node.component is None else ([node.component], node.end - 1)

    def _first_needed(self, end: int) -> int:
        return max(end - 1, 0)

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

    # insert

    def insert(
        self,
        key: RadixKey,
        kv_indices: SlotArray | None = None,
        *,
        after: PrefixHandle | None = None,
        priority: int = 0,
        counted_len: int | None = None,
        states: Mapping[int, int] = NO_STATES,
    ) -> StateInsertResult:
        """Store `key` up to the deepest state that is offered and can be recorded, and record the states on the way.

        No request could use what follows the last state: those slots stay the caller's, as the tail of a page does.
        Without a state that can be recorded nothing new is stored.

        Args:
            key: Tokens and namespace.
            kv_indices: Slot of each element.
            after: Handle or receipt of a stored prefix, after which to start.
            priority: For the `priority` policy.
            counted_len: The same request's earlier inserts ended here: they count no second hit. None for `after`'s end.
            states: Slots of states by the number of elements that each has read. The cache takes those at multiples of
                `state_alignment` where none is recorded; the others come back in `state_freed`.

        Raises:
            ConfigError: Slots, positions or handle do not fit the key. Nothing has changed then.
            CorruptCacheError: `after` is of a dropped prefix or of another cache.

        Complexity: O(tokens of `key` after `after`) plus O(log n) per state.
        """
        slots = self._offered(key, kv_indices)
        if self._disabled:
            return StateInsertResult(0, 0, self._tree.root, _slots_of(states))
        start = self._tree.root if after is None else self._prefix_of(key, after)
        _require_positions(states, start.end, len(key))
        fitting = {position: states[position] for position in states if not position % self._alignment}
        total_len = max(fitting, default=start.end)
        prefix_len, node = self._insert(key, slots, start, total_len, priority=priority, counted_len=counted_len)
        returned = {position: states[position] for position in states if position not in fitting}
        returned |= self._record(node, fitting, priority)
        return StateInsertResult(prefix_len, total_len, node, _slots_of(returned))

    def _record(self, last: StateNode, states: Mapping[int, int], priority: int) -> dict[int, int]:
        """Record states on the path of `last`, cutting nodes at their positions; returns those that are recorded already."""
        now, reach = self._tree.now, last.end
        returned: dict[int, int] = {}
        step = last
        for position in sorted(states, reverse=True):
            while step.start >= position:
                assert step.parent is not None, "the root begins before every position"
                step = step.parent
            if position < step.end:
                step = self._divide(step, position - step.start)
            if step.component is None:
                self._give_state(step, states[position], priority, reach)
            else:
                step.component.record_again(now, priority, reach)
                self._components.requeue(step.component)
                returned[position] = states[position]
        return returned

    def _give_state(self, node: StateNode, slot: int, priority: int, reach: int) -> None:
        """Give a tombstone a state, used now and not locked."""
        self._components.attach(node, State(node, slot, self._tree.now, priority, reach))

    # locks and eviction

    def inc_lock_ref(self, handle: PrefixHandle) -> StateLock:
        """Keep a prefix from eviction, and the state at its end; returns the receipt.

        Raises:
            CorruptCacheError: The handle is of a dropped prefix or of another cache, or its state was evicted since.
        """
        lock = super().inc_lock_ref(handle)
        state: State | None = lock.node.component
        if state is not None:
            state.hit_count += 1  # held now, so it waits in no queue
        return lock

    def dec_state_lock_only(self, handle: PrefixHandle) -> None:
        """Give the lock on the state back early, once it was copied; the tokens stay locked.

        The state stays for other requests, and may be evicted.

        Raises:
            CorruptCacheError: The receipt holds no state, or not any more. Nothing has changed then.
        """
        lock = self._open_lock(handle)
        if not lock.state_locked:
            raise CorruptCacheError("this lock holds no state, or its state was released before")
        self._give_components_back(lock)

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

    def _check_kind(self, components: Sequence[State]) -> None:
        for state in components:
            require(state.node.end % self._alignment == 0, "a state lies at no end of a page and chunk")
            require(0 <= state.lock_ref <= state.node.handle_locks, "a state has more locks than its node")
        slots = {state.slot for state in components}
        require(self._simulated or len(slots) == len(components), "a state's slot is stored twice")

    # requests

    def store_row(self, req: RequestRow) -> StoredRow:
        """Insert what `req` has computed up to its deepest recorded state; takes its states."""
        key = req.key()
        offered = {position: state for position, state in req.states.items() if position <= len(key)}
        result = self.insert(
            key,
            req.kv_indices[: len(key)],
            after=req.handle,  # of an empty prefix, too: it says that the cache was not reset since
            priority=req.priority,
            counted_len=req.num_inserted,
            states=offered,
        )
        for position in offered:
            del req.states[position]
        duplicates = req.kv_indices[req.protected_len : result.prefix_len].copy()
        return StoredRow(result.handle, result.total_len, EvictResult(duplicates, state_freed=result.state_freed))

    def end_prompt(self, stored: StoredRow, req: RequestRow) -> None:
        """Cut nothing: without a state at its end a prompt would not outlive its output, and with one it is a node."""


def _require_positions(states: Mapping[int, int], start: int, stop: int) -> None:
    for position in states:
        if not max(start, 1) <= position <= stop:
            raise ConfigError(
                f"a state after {position} tokens does not fit a key of {stop}, stored after {start}; give each state by the "
                "number of tokens that it has read"
            )


def _slots_of(states: Mapping[int, int]) -> SlotArray:
    return np.array([states[position] for position in sorted(states)], dtype=np.int64) if states else NO_SLOTS
