"""In which order nodes leave a radix tree: policies give keys, the queue keeps candidates sorted by them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvgraft.errors import CorruptCacheError
from kvgraft.prefix.node import NOT_QUEUED, RadixNode

EvictionKey = tuple[int, ...]
EvictionPolicy = Callable[[RadixNode], EvictionKey]
"""Orders nodes for eviction: the smallest key leaves first."""


def least_recently_used(node: RadixNode) -> EvictionKey:
    """Evict what was not matched or inserted for longest."""
    return (node.last_access,)


class EvictionQueue:
    """Candidates for eviction in an indexed binary heap; each node knows its place in it.

    Chosen over a lazy heap, which pays for all nodes touched since the last eviction at once, in the middle of a
    request, and over an intrusive list, which cannot take back an old node (a parent that became a leaf, a lock given
    back) at its place, nor sort by anything but the time of insertion.

    Invariants:
        - `keys[i] == policy(nodes[i])`, and no key is smaller than its parent's in the heap.
        - `nodes[i].queue_index == i`; a node outside has `NOT_QUEUED`.

    Complexity: every change is O(log n) at worst; `add` and `update` of the largest key, which is what LRU does, cost
    O(1) on average.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._keys: list[EvictionKey] = []
        self._nodes: list[RadixNode] = []

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[RadixNode]:
        return iter(self._nodes)

    def add(self, node: RadixNode) -> None:
        """Make a node that is not queued a candidate."""
        self._keys.append(self._policy(node))
        self._nodes.append(node)
        node.queue_index = len(self._nodes) - 1
        self._sift_up(node.queue_index)

    def update(self, node: RadixNode) -> None:
        """Restore the order after the policy's key of a queued node changed."""
        self._keys[node.queue_index] = self._policy(node)
        self._restore(node.queue_index)

    def remove(self, node: RadixNode) -> None:
        """Withdraw a queued node."""
        hole = node.queue_index
        last_key, last = self._keys.pop(), self._nodes.pop()
        if last is not node:
            self._place(hole, last_key, last)
            self._restore(hole)
        node.queue_index = NOT_QUEUED

    def pop(self) -> RadixNode:
        """Withdraw and return the node with the smallest key; the queue is not empty."""
        node = self._nodes[0]
        self.remove(node)
        return node

    def clear(self) -> None:
        """Withdraw all."""
        for node in self._nodes:
            node.queue_index = NOT_QUEUED
        self._keys.clear()
        self._nodes.clear()

    def check(self) -> None:
        """Verify the invariants.

        Raises:
            CorruptCacheError: The first one that does not hold.
        """
        for index, (key, node) in enumerate(zip(self._keys, self._nodes, strict=True)):
            if node.queue_index != index:
                raise CorruptCacheError(f"node at {index} of the eviction queue believes to be at {node.queue_index}")
            if key != self._policy(node):
                raise CorruptCacheError(f"key {key} in the eviction queue is not the policy's {self._policy(node)}")
            if index and key < self._keys[(index - 1) // 2]:
                raise CorruptCacheError(f"the eviction queue is out of order at {index}")

    def _place(self, index: int, key: EvictionKey, node: RadixNode) -> None:
        self._keys[index] = key
        self._nodes[index] = node
        node.queue_index = index

    def _restore(self, index: int) -> None:
        if self._sift_up(index) == index:
            self._sift_down(index)

    def _sift_up(self, index: int) -> int:
        """Move an entry up until its parent's key is not larger; return where it ends."""
        keys, nodes = self._keys, self._nodes
        key, node = keys[index], nodes[index]
        while index:
            above = (index - 1) // 2
            if not key < keys[above]:
                break
            self._place(index, keys[above], nodes[above])
            index = above
        self._place(index, key, node)
        return index

    def _sift_down(self, index: int) -> None:
        """Move an entry down until its children's keys are not smaller."""
        keys, nodes = self._keys, self._nodes
        key, node, size = keys[index], nodes[index], len(keys)
        while (below := 2 * index + 1) < size:
            if below + 1 < size and keys[below + 1] < keys[below]:
                below += 1
            if not keys[below] < key:
                break
            self._place(index, keys[below], nodes[below])
            index = below
        self._place(index, key, node)
