"""Verifies the invariants of a radix tree from the outside, node by node."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvgraft.errors import CorruptCacheError

if TYPE_CHECKING:
    from kvgraft.prefix.node import RadixNode


def check_tree(root: RadixNode, page_size: int, queued: set[RadixNode]) -> tuple[int, int]:
    """Verify structure, locks, recency and the set of eviction candidates.

    Args:
        root: Root of the tree.
        page_size: Tokens per page.
        queued: The nodes in the eviction queue.

    Returns:
        Tokens in unlocked and in locked nodes.

    Raises:
        CorruptCacheError: The first invariant that does not hold.
    """
    nodes = list(root.subtree())
    _require(root.lock_ref == 1 and not len(root) and root.parent is None, "the root is not an empty, locked root")
    for node in nodes:
        _check_children(node, page_size, is_root=node is root)
    for node in nodes[1:]:
        _check_contents(node, page_size)
        locks = node.handle_locks + sum(child.lock_ref for child in node.children.values())
        _require(node.handle_locks >= 0 and node.lock_ref == locks, f"lock_ref is {node.lock_ref}, not {locks}")
    slots = np.concatenate([node.kv_indices for node in nodes])
    _require(len(np.unique(slots)) == len(slots), "a slot is stored twice")
    candidates = {node for node in nodes if not node.children and not node.lock_ref}
    _require(candidates == queued, "the eviction queue does not hold exactly the unlocked leaves")
    evictable_size = sum(len(node) for node in nodes if not node.lock_ref)
    return evictable_size, len(slots) - evictable_size


def _check_children(node: RadixNode, page_size: int, *, is_root: bool) -> None:
    for edge, child in node.children.items():
        _require(child.parent is node and child.edge == edge, "a child does not point back to its parent")
        page = child.token_ids[:page_size].tobytes()
        first_page = edge[1] if is_root and isinstance(edge, tuple) else edge
        _require(first_page == page, "a child is not filed under its first page")
        _require(node.last_access >= child.last_access, "a node was accessed before its child")


def _check_contents(node: RadixNode, page_size: int) -> None:
    _require(len(node) > 0 and len(node) % page_size == 0, f"a node of {len(node)} tokens is not whole pages")
    _require(len(node.kv_indices) == len(node), "a node has not one slot per token")
    for array in (node.token_ids, node.kv_indices):
        _require(array.base is None and not array.flags.writeable, "a node holds a view or a writable array")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise CorruptCacheError(message)
