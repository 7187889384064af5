"""Candidates for eviction, sorted by what a policy says of them."""

from __future__ import annotations

import sys
from collections import OrderedDict
from itertools import chain
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from kvgraft.errors import CorruptCacheError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvgraft.prefix.eviction.policies import EvictionKey

NOT_QUEUED = -1
"""`queue_index` of what waits in no eviction queue."""

_IN_RUN = sys.maxsize
"""`queue_index` of what waits in the run of a queue; indices of its heap are smaller."""


class Queueable(Protocol):
    """What an eviction queue holds: it stores its place there."""

    queue_index: int


Item = TypeVar("Item", bound=Queueable)


class EvictionQueue(Generic[Item]):
    """Candidates for eviction, in two parts; each of them knows where it waits.

    What arrives with the largest key so far joins the *run*, a linked list with an index (`OrderedDict`): there a change
    costs the same however many wait. With LRU that is whatever was just made or used. The others (a parent that became
    a leaf, a lock given back, policies whose keys do not grow with time) wait in an indexed binary *heap*.

    Chosen over a heap alone, whose sifting was most of what a bulk eviction cost; over a lazy heap, which pays for all
    nodes touched since the last eviction at once, in the middle of a request; and over a list alone, which cannot take
    back an old node at its place, nor sort by anything but the time of insertion.

    Invariants:
        - `run[item]` and `keys[i]` are what the policy says of `item` and of `items[i]`.
        - Keys of the run never fall, and none is larger than `highest`; no key of the heap is smaller than its parent's.
        - `items[i].queue_index == i`; in the run it is `_IN_RUN`, outside `NOT_QUEUED`.

    Complexity: O(1) in the run, O(log n) at worst in the heap.
    """

    def __init__(self, policy: Callable[[Item], EvictionKey]) -> None:
        self._policy = policy
        self._run: OrderedDict[Item, Any] = OrderedDict()
        self._highest: Any = None
        self._keys: list[Any] = []
        self._items: list[Item] = []

    def __len__(self) -> int:
        return len(self._run) + len(self._items)

    def __iter__(self) -> Iterator[Item]:
        return chain(self._run, self._items)

    def add(self, item: Item) -> None:
        """Make an item that is not queued a candidate."""
        key = self._policy(item)
        if self._run and key < self._highest:
            self._keys.append(key)
            self._items.append(item)
            item.queue_index = len(self._items) - 1
            self._sift_up(item.queue_index)
        else:
            self._run[item] = self._highest = key
            item.queue_index = _IN_RUN

    def update(self, item: Item) -> None:
        """Restore the order after the policy's key of a queued item changed."""
        key, run = self._policy(item), self._run
        if item.queue_index == _IN_RUN and not key < self._highest:
            run.move_to_end(item)
            run[item] = self._highest = key
        elif item.queue_index == _IN_RUN and run[item] == key:
            return
        elif item.queue_index == _IN_RUN or (run and not key < self._highest):
            self.remove(item)
            self.add(item)
        else:
            self._keys[item.queue_index] = key
            self._restore(item.queue_index)

    def remove(self, item: Item) -> None:
        """Withdraw a queued item."""
        hole, item.queue_index = item.queue_index, NOT_QUEUED
        if hole == _IN_RUN:
            del self._run[item]
            return
        last_key, last = self._keys.pop(), self._items.pop()
        if last is not item:
            self._place(hole, last_key, last)
            self._restore(hole)

    def first(self) -> Item:
        """The item with the smallest key; the queue is not empty."""
        if not self._run:
            return self._items[0]
        oldest = next(iter(self._run))
        return self._items[0] if self._items and self._keys[0] < self._run[oldest] else oldest

    def pop(self) -> Item:
        """Withdraw and return the item with the smallest key; the queue is not empty."""
        item = self.first()
        self.remove(item)
        return item

    def clear(self) -> None:
        """Withdraw all candidates; each may be added again."""
        for item in self:
            item.queue_index = NOT_QUEUED
        self._run.clear()
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
            self._check_item(item, index, key)
            if index and key < self._keys[(index - 1) // 2]:
                raise CorruptCacheError(f"the eviction queue is out of order at {index}")
        previous = None
        for item, key in self._run.items():
            self._check_item(item, _IN_RUN, key)
            if (previous is not None and key < previous) or self._highest < key:
                raise CorruptCacheError(f"the run of the eviction queue is out of order at key {key}")
            previous = key

    def _check_item(self, item: Item, index: int, key: EvictionKey) -> None:
        if item.queue_index != index:
            raise CorruptCacheError(f"node at {index} of the eviction queue believes to be at {item.queue_index}")
        if key != self._policy(item):
            raise CorruptCacheError(f"key {key} in the eviction queue is not the policy's {self._policy(item)}")

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
