"""Verifies what a hybrid tree promises beyond a plain one: windows, their locks, tombstones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.prefix.radix.invariants import require, require_owned, require_unique

if TYPE_CHECKING:
    from collections.abc import Set

    from kvgraft.prefix.swa.node import SWANode, Window


def check_hybrid_tree(root: SWANode, queued: Set[Window], *, unique_slots: bool = True) -> tuple[int, int]:
    """Verify the window components.

    Args:
        root: Root of the tree.
        queued: The windows in the eviction queue.
        unique_slots: Whether no slot may be stored twice.

    Returns:
        Tokens of uncovered and of covered windows.

    Raises:
        CorruptCacheError: The first invariant that does not hold.
    """
    nodes = list(root.subtree())[1:]
    windows = [node.window for node in nodes if node.window is not None]
    for node in nodes:
        require(node.window is not None or bool(node.children) or node.lock_ref > 0, "an unlocked leaf is a tombstone")
    for window in windows:
        require(window.node.window is window, "a window belongs to another node")
        require(len(window) == len(window.node), "a window has not one slot per token")
        require_owned(window.swa_indices)
    if unique_slots:
        require_unique([window.swa_indices for window in windows])
    _check_locks(nodes)
    require(
        {window for window in windows if not window.lock_ref} == queued, "the window queue is not the uncovered ones"
    )
    evictable_size = sum(len(window) for window in windows if not window.lock_ref)
    return evictable_size, sum(map(len, windows)) - evictable_size


def _check_locks(nodes: list[SWANode]) -> None:
    """Verify `full_lock_ref >= swa_lock_ref`, full locks counted on and below each node."""
    full_locks: dict[SWANode, int] = {}
    for node in reversed(nodes):
        full_locks[node] = node.handle_locks + sum(full_locks[child] for child in node.children.values())
        if node.window is not None:
            require(0 <= node.window.lock_ref <= full_locks[node], "a window has more locks than its node")
