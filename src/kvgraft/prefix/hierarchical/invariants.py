"""Verifies what a tree of two tiers promises beyond a plain one: where nodes lie, and who waits in which queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.prefix.radix.invariants import check_structure, require, require_owned, require_unique

if TYPE_CHECKING:
    from collections.abc import Set

    from kvgraft.prefix.hierarchical.node import TieredNode


def check_tiered_tree(
    root: TieredNode, page_size: int, queued: Set[TieredNode], host_queued: Set[TieredNode]
) -> tuple[int, int, int]:
    """Verify structure, tiers and both sets of eviction candidates.

    Args:
        root: Root of the tree.
        page_size: Tokens per page.
        queued: The nodes in the device queue.
        host_queued: The nodes in the host queue.

    Returns:
        Tokens in unlocked and in locked nodes on the device, and tokens with a copy on the host.

    Raises:
        CorruptCacheError: The first invariant that does not hold.
    """
    nodes = check_structure(root, page_size)
    for node in nodes:
        _check_tiers(node, root)
    require_unique((node, node.kv_indices) for node in nodes if node.on_device)
    require_unique((node, node.host_indices) for node in nodes if node.on_host)
    device = {node for node in nodes if node.on_device and not node.device_children and not node.lock_ref}
    require(device == queued, "the device queue does not hold exactly the unlocked device leaves")
    host = {node for node in nodes if not node.on_device and not node.children and not node.host_locks}
    require(host == host_queued, "the host queue does not hold exactly the unread host leaves")
    evictable = sum(len(node) for node in nodes if node.on_device and not node.lock_ref)
    protected = sum(len(node) for node in nodes if node.on_device and node.lock_ref)
    return evictable, protected, sum(len(node) for node in nodes if node.on_host)


def _check_tiers(node: TieredNode, root: TieredNode) -> None:
    require(node.on_device or node.on_host, "a node lies in no tier")
    require(len(node.kv_indices) in (0, len(node)), "a node has not one device slot per token")
    require(len(node.host_indices) in (0, len(node)), "a node has not one host slot per token")
    parent = node.parent or root
    require(parent is root or not node.on_device or parent.on_device, "a node hangs on the device alone")
    require(node.device_children == sum(child.on_device for child in node.children.values()), "device children differ")
    require(node.on_device or not node.lock_ref, "a node on the host only is locked")
    require(node.host_locks >= 0, "host_locks is negative")
    for array in (node.kv_indices, node.host_indices):
        if len(array):
            require_owned(array)
