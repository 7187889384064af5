"""Verifies the invariants of a radix tree from the outside, node by node."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np

from kvgraft.errors import CorruptCacheError
from kvgraft.prefix.radix.node import RadixNode
from kvgraft.token_key import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Set

    from kvgraft.prefix.results import SlotArray
    from kvgraft.token_key import KeyNamespace

Node = TypeVar("Node", bound=RadixNode)


def check_tree(
    root: RadixNode, page_size: int, queued: Set[RadixNode], *, unique_slots: bool = True
) -> tuple[int, int]:
    """Verify structure, locks and the set of eviction candidates.

    Args:
        root: Root of the tree.
        page_size: Tokens per page.
        queued: The nodes in the eviction queue.
        unique_slots: Whether no slot may be stored twice in a namespace.

    Returns:
        Tokens in unlocked and in locked nodes.

    Raises:
        CorruptCacheError: The first invariant that does not hold.
    """
    nodes = check_structure(root, page_size)
    for node in nodes:
        require(len(node.kv_indices) == len(node), "a node has not one slot per token")
        require_owned(node.kv_indices)
    if unique_slots:
        require_unique((node, node.kv_indices) for node in nodes)
    candidates = {node for node in nodes if not node.children and not node.lock_ref}
    require(candidates == queued, "the eviction queue does not hold exactly the unlocked leaves")
    evictable_size = sum(len(node) for node in nodes if not node.lock_ref)
    return evictable_size, sum(len(node) for node in nodes) - evictable_size


def check_structure(root: Node, page_size: int) -> list[Node]:
    """Verify links, edges, lengths and lock counts; returns the nodes without the root."""
    nodes = list(root.subtree())
    require(not len(root) and root.parent is None and root.end == 0, "the root is not empty")
    locked = sum(child.lock_ref > 0 for child in root.children.values())
    require(root.lock_ref == 1 + locked, "the root does not count as locked once")
    for node in nodes:
        _check_children(node, root, page_size)
    for node in nodes[1:]:
        require(len(node) > 0 and len(node) % page_size == 0, f"a node of {len(node)} tokens is not whole pages")
        overlap = len(node.tokens) // TOKEN_BYTES - len(node)
        require(overlap in (0, 1), "a node has not one slot per token")
        locks = node.handle_locks + sum(child.lock_ref > 0 for child in node.children.values())
        require(node.handle_locks >= 0 and node.lock_ref == locks, f"lock_ref is {node.lock_ref}, not {locks}")
        pages = len(node) // page_size
        require(len(node.page_hashes) in (0, 32 * pages), "a node has not one hash per page")
    return nodes[1:]


def require_owned(array: SlotArray) -> None:
    """Verify that a node's array is its own and read-only."""
    require(array.base is None and not array.flags.writeable, "a node holds a view or a writable array")


def require_unique(held: Iterable[tuple[RadixNode, SlotArray]]) -> None:
    """Verify that no slot occurs twice in a namespace: one owner may store a text in several, by reference count."""
    arrays: dict[KeyNamespace | None, list[SlotArray]] = {}
    for node, slots in held:
        arrays.setdefault(node.namespace, []).append(slots)
    for parts in arrays.values():
        slots = np.concatenate(parts)
        require(len(np.unique(slots)) == len(slots), "a slot is stored twice")


def _check_children(node: RadixNode, root: RadixNode, page_size: int) -> None:
    for edge, child in node.children.items():
        require(child.parent is node and child.edge == edge, "a child does not point back to its parent")
        require(child.tree is root.tree, "a node belongs to another tree")
        require(child.end == node.end + len(child), "a node does not begin where its parent ends")
        first_page = edge[1] if node is root and isinstance(edge, tuple) else edge
        overlap = len(child.tokens) // TOKEN_BYTES - len(child)
        require(
            first_page == child.tokens[: (page_size + overlap) * TOKEN_BYTES], "a child is not under its first page"
        )


def require(holds: bool, message: str) -> None:
    """Raise `CorruptCacheError` with `message` unless it holds."""
    if not holds:
        raise CorruptCacheError(message)
