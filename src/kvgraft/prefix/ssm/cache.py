"""Prefix cache for hybrid models with state-space or linear-attention layers: token slots and states over one radix tree.

Such layers keep one state of fixed size for a text of any length, and overwrite it with every token. So a prefix can
be gone on from only where its state was kept. A node always has the slots of its tokens, for the attention layers; at its end
it has a state or not (a tombstone). States are numbers of slots in the owner's pool; the owner copies them on write.

Source: the behaviour follows SGLang's MambaRadixCache (pull request #11214 and its fixes). Departures, with reasons in
docs/design/prefix-cache.md: a match cuts nothing; the state of a lock can be given back early; a match refreshes its own
state only; what a lock alone kept leaves with it; candidates wait in queues.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.errors import ConfigError
from kvgraft.prefix.lifecycle import StoredRow
from kvgraft.prefix.results import NO_SLOTS, EvictResult, PrefixHandle, SlotArray
from kvgraft.prefix.ssm.base import BaseStateCache
from kvgraft.prefix.ssm.results import StateInsertResult

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvgraft.prefix.request import RequestRow
    from kvgraft.prefix.semantic_fallback import SlotCopier
    from kvgraft.prefix.ssm.node import StateLock, StateNode
    from kvgraft.substitution import SemanticPrefixProvider
    from kvgraft.token_key import RadixKey

NO_STATES: Mapping[int, int] = MappingProxyType({})


class StateRadixCache(BaseStateCache):
    """A radix tree with nodes that own slots of tokens and, some of them, a state. Not thread-safe."""

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
        start = self._prefix_of(key, after)
        _require_positions(states, start.end, len(key))
        fitting = {position: states[position] for position in states if not position % self._alignment}
        total_len = max(fitting, default=start.end)
        path, node = self._walk(key, start, total_len)
        counted_len = start.end if counted_len is None else counted_len
        self._credit(start, path, total_len, priority, counted_len)
        prefix_len = self._stored_len(node, path, slots)
        if node.end < total_len:
            node = self._add_node(node, key, slots, total_len, priority, hit_count=int(total_len > counted_len))
        returned = {position: states[position] for position in states if position not in fitting}
        returned |= self._record(node, fitting, priority)
        if node.queue_index < 0:
            self._queue_if_candidate(node)
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
                self._components.record(step, states[position], now, priority, reach)
            else:
                self._components.record_again(step.component, now, priority, reach)
                returned[position] = states[position]
        return returned

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

    def lock_inserted(self, handle: PrefixHandle) -> StateLock:
        """Lock the prefix of an insert, and the state at its end."""
        return self._lock(self._tree.resolve(handle))

    def end_prompt(self, stored: StoredRow, req: RequestRow) -> None:
        """Cut nothing: without a state at its end a prompt would not outlive its output, and with one it is a node."""

    def set_semantic_provider(
        self,
        provider: SemanticPrefixProvider | None,
        *,
        copy_slots: SlotCopier | None = None,
        deadline_s: float | None = None,
    ) -> None:
        """Refuse: a state has read all tokens before it, so no other text's can stand in for it."""
        if provider is not None:
            raise ConfigError("StateRadixCache takes no semantic provider; use RadixCache for models without states")


def _require_positions(states: Mapping[int, int], start: int, stop: int) -> None:
    for position in states:
        if not max(start, 1) <= position <= stop:
            raise ConfigError(
                f"a state after {position} tokens does not fit a key of {stop}, stored after {start}; give each state by the "
                "number of tokens that it has read"
            )


def _slots_of(states: Mapping[int, int]) -> SlotArray:
    return np.array([states[position] for position in sorted(states)], dtype=np.int64) if states else NO_SLOTS
