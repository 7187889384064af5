"""The states of a tree: how many there are, which of them can leave, and in which order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.prefix.component.parts import TreeComponents
from kvgraft.prefix.ssm.node import State

if TYPE_CHECKING:
    from kvgraft.prefix.eviction.policies import EvictionKey, EvictionPolicy
    from kvgraft.prefix.ssm.node import StateNode


class TreeStates(TreeComponents[State]):
    """Records, locks, refreshes and frees the states of one tree; each counts one."""

    def __init__(self, policy: EvictionPolicy) -> None:
        super().__init__(self._order)
        self._policy = policy

    def _order(self, state: State) -> EvictionKey:
        """Key of the policy; of states that are alike to it, the one nearest to the root leaves first.

        An insert may record several: the deepest of them saves most, and what follows it can do without the others.
        """
        return (self._policy(state), state.node.end)  # type: ignore[return-value]

    def record(self, node: StateNode, slot: int, now: int, priority: int, reach: int) -> None:
        """Give a tombstone a state, used now and not locked."""
        self._attach(node, State(node, slot, now, priority, reach))

    def record_again(self, state: State, now: int, priority: int, reach: int) -> None:
        """Take in that a request computed a state that is recorded."""
        state.last_access = now
        state.hit_count += 1
        state.priority = max(state.priority, priority)
        state.reach = max(state.reach, reach)
        self.requeue(state)

    def touch(self, state: State, now: int) -> None:
        """Mark a state as used now.

        Those above it stay as old as they are: a request that goes on from this one does not need them.
        """
        state.last_access = now
        self.requeue(state)
