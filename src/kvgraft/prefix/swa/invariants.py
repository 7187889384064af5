"""Verifies what a hybrid tree promises of its windows: their slots and locks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.prefix.component.invariants import components_of
from kvgraft.prefix.radix.invariants import require, require_owned, require_unique

if TYPE_CHECKING:
    from kvgraft.prefix.swa.node import SWANode, Window


def check_windows(root: SWANode, *, unique_slots: bool) -> None:
    """Verify the windows of a tree: their slots and locks.

    Args:
        root: Root of the tree.
        unique_slots: Whether no slot may be stored twice in a namespace.

    Raises:
        CorruptCacheError: The first invariant that does not hold.
    """
    windows: list[Window] = components_of(root)
    for window in windows:
        require(len(window) == len(window.node), "a window has not one slot per token")
        require_owned(window.swa_indices)
    if unique_slots:
        require_unique((window.node, window.swa_indices) for window in windows)
    _check_locks(list(root.subtree())[1:])


def _check_locks(nodes: list[SWANode]) -> None:
    """Verify `full_lock_ref >= swa_lock_ref`, full locks counted on and below each node."""
    full_locks: dict[SWANode, int] = {}
    for node in reversed(nodes):
        full_locks[node] = node.handle_locks + sum(full_locks[child] for child in node.children.values())
        if node.component is not None:
            require(0 <= node.component.lock_ref <= full_locks[node], "a window has more locks than its node")
