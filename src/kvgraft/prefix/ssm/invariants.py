"""Verifies what a tree with states promises of them: where they lie, their slots and locks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.prefix.component.invariants import components_of
from kvgraft.prefix.radix.invariants import require

if TYPE_CHECKING:
    from kvgraft.prefix.ssm.node import State, StateNode


def check_states(root: StateNode, alignment: int, *, unique_slots: bool) -> None:
    """Verify the states of a tree.

    Args:
        root: Root of the tree.
        alignment: What every position of a state is a multiple of.
        unique_slots: Whether no slot may be stored twice.

    Raises:
        CorruptCacheError: The first invariant that does not hold.
    """
    states: list[State] = components_of(root)
    for state in states:
        require(state.node.end % alignment == 0, "a state lies at no end of a page and chunk")
        require(0 <= state.lock_ref <= state.node.handle_locks, "a state has more locks than its node")
    if unique_slots:
        require(len({state.slot for state in states}) == len(states), "a state's slot is stored twice")
