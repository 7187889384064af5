"""Candidates for eviction, sorted by what a policy says of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from kvgraft.errors import CorruptCacheError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvgraft.prefix.eviction.policies import EvictionKey

NOT_QUEUED = -1
"""`queue_index` of what waits in no eviction queue."""


class Queueable(Protocol):
    """What an eviction queue holds: it stores its place there."""

    queue_index: int


Item = TypeVar("Item", bound=Queueable)


class EvictionQueue(Generic[Item]):
    """Candidates for eviction in an indexed binary heap; each of them knows its place in it.

    Chosen over a lazy heap, which pays for all nodes touched since the last eviction at once, in the middle of a
    request, and over an intrusive list, which cannot take back an old node (a parent that became a leaf, a lock given
    back) at its place, nor sort by anything but the time of insertion.

    Invariants:
        - `keys[i] == policy(items[i])`, and no key is smaller than its parent's in the heap.
        - `items[i].queue_index == i`; what is outside has `NOT_QUEUED`.

    Complexity: every change is O(log n) at worst; `add` and `update` of the largest key, which is what LRU does, cost
    O(1) on average.
    """

    def __init__(self, policy: Callable[[Item], EvictionKey]) -> None:
        self._policy = policy
        self._keys: list[Any] = []
        self._items: list[Item] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def add(self, item: Item) -> None:
        """Make an item that is not queued a candidate."""
        self._keys.append(self._policy(item))
        self._items.append(item)
        item.queue_index = len(self._items) - 1
        self._sift_up(item.queue_index)

    def update(self, item: Item) -> None:
        """Restore the order after the policy's key of a queued item changed."""
        self._keys[item.queue_index] = self._policy(item)
        self._restore(item.queue_index)

    def remove(self, item: Item) -> None:
        """Withdraw a queued item."""
        hole = item.queue_index
        last_key, last = self._keys.pop(), self._items.pop()
        if last is not item:
            self._place(hole, last_key, last)
            self._restore(hole)
        item.queue_index = NOT_QUEUED

    def pop(self) -> Item:
        """Withdraw and return the item with the smallest key; the queue is not empty."""
        item = self._items[0]
        self.remove(item)
        return item

    def clear(self) -> None:
        """Withdraw all candidates; each may be added again."""
        for item in self._items:
            item.queue_index = NOT_QUEUED
        self._keys.clear()
        self._items.clear()

    def check(self) -> None:
        """Verify the invariants.

        Raises:
            CorruptCacheError: The first one that does not hold.
        """
        if len(self._keys) != len(self._items):
            raise CorruptCacheError(f"{len(self._keys)} keys for {len(self._items)} nodes in the eviction queue")
        for index, (key, item) in enumerate(zip(self._keys, self._items, strict=True)):
            if item.queue_index != index:
                raise CorruptCacheError(f"node at {index} of the eviction queue believes to be at {item.queue_index}")
            if key != self._policy(item):
                raise CorruptCacheError(f"key {key} in the eviction queue is not the policy's {self._policy(item)}")
            if index and key < self._keys[(index - 1) // 2]:
                raise CorruptCacheError(f"the eviction queue is out of order at {index}")

    def _place(self, index: int, key: EvictionKey, item: Item) -> None:
        self._keys[index] = key
        self._items[index] = item
        item.queue_index = index

    def _restore(self, index: int) -> None:
        if self._sift_up(index) == index:
            self._sift_down(index)

    def _sift_up(self, index: int) -> int:
        """Move an entry up until its parent's key is not larger; return where it ends."""
        keys, items = self._keys, self._items
        key, item = keys[index], items[index]
        while index:
            above = (index - 1) // 2
            if not key < keys[above]:
                break
            self._place(index, keys[above], items[above])
            index = above
        self._place(index, key, item)
        return index

    def _sift_down(self, index: int) -> None:
        """Move an entry down until its children's keys are not smaller."""
        keys, items = self._keys, self._items
        key, item, size = keys[index], items[index], len(keys)
        while (below := 2 * index + 1) < size:
            right = below + 1
            if right < size and keys[right] < keys[below]:
                below = right
            smaller = keys[below]
            if not smaller < key:
                break
            keys[index] = smaller  # `_place`, inlined: this loop is most of what eviction costs
            items[index] = moved = items[below]
            moved.queue_index = index
            index = below
        self._place(index, key, item)
