"""Verifies what a tree with states promises beyond a plain one: states, their locks, tombstones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.prefix.radix.invariants import require

if TYPE_CHECKING:
    from collections.abc import Set

    from kvgraft.prefix.ssm.node import State, StateNode


def check_states(root: StateNode, alignment: int, queued: Set[State], *, unique_slots: bool = True) -> tuple[int, int]:
    """Verify the states of a tree.

    Args:
        root: Root of the tree.
        alignment: What every position of a state is a multiple of.
        queued: The states in the eviction queue.
        unique_slots: Whether no slot may be stored twice.

    Returns:
        States that no receipt holds, and states that one does.

    Raises:
        CorruptCacheError: The first invariant that does not hold.
    """
    require(root.state is None, "the root has a state")
    nodes = list(root.subtree())[1:]
    states = [node.state for node in nodes if node.state is not None]
    for node in nodes:
        require(node.state is not None or bool(node.children) or node.lock_ref > 0, "an unlocked leaf has no state")
    for state in states:
        require(state.node.state is state, "a state belongs to another node")
        require(state.node.end % alignment == 0, "a state lies at no end of a page and chunk")
        require(0 <= state.lock_ref <= state.node.handle_locks, "a state has more locks than its node")
    if unique_slots:
        require(len({state.slot for state in states}) == len(states), "a state's slot is stored twice")
    require({state for state in states if not state.lock_ref} == queued, "the queue of states is not the unlocked ones")
    evictable_size = sum(not state.lock_ref for state in states)
    return evictable_size, len(states) - evictable_size
