"""Verifies what a tree over two pools promises beyond a plain one, for components of any kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvgraft.prefix.radix.invariants import require

if TYPE_CHECKING:
    from collections.abc import Set

    from kvgraft.prefix.component.node import Component, ComponentNode


def check_components(root: ComponentNode[Any], queued: Set[Component]) -> tuple[int, int]:
    """Verify owners and the queue.

    Args:
        root: Root of the tree.
        queued: The components in the eviction queue.

    Returns:
        Sizes of the components that no receipt holds, and of those that one does.

    Raises:
        CorruptCacheError: The first invariant that does not hold.
    """
    require(root.component is None, "the root has a component")
    components = components_of(root)
    for component in components:
        require(component.node.component is component, "a component belongs to another node")
    require(
        {component for component in components if not component.lock_ref} == queued,
        "the queue of components is not the unlocked ones",
    )
    evictable_size = sum(len(component) for component in components if not component.lock_ref)
    return evictable_size, sum(map(len, components)) - evictable_size


def components_of(root: ComponentNode[Any]) -> list[Any]:
    """Return the components of all nodes below `root`, in the order of the tree."""
    return [node.component for node in root.subtree() if node.component is not None]
