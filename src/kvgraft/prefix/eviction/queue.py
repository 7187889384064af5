"""Candidates for eviction, sorted by what a policy says of them."""

from __future__ import annotations

import sys
from itertools import chain
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kvgraft.errors import CorruptCacheError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvgraft.prefix.eviction.policies import EvictionKey

NOT_QUEUED = -1
"""`queue_index` of what waits in no eviction queue."""

_IN_RUN = sys.maxsize
"""`queue_index` of what waits in the run of a queue; indices of its heap are smaller."""


class Queueable:
    """An item of an eviction queue, which stores its place there.

    Attributes:
        queue_index: Place in the heap of its queue, or that it waits in the run, or `NOT_QUEUED`.
        queue_key: In the run, what the policy said when it joined.
        queue_before: In the run, its neighbour that leaves sooner; None outside.
        queue_after: In the run, its neighbour that leaves later; None outside.
    """

    __slots__ = ("queue_after", "queue_before", "queue_index", "queue_key")

    queue_after: Any
    queue_before: Any
    queue_index: int
    queue_key: Any

    def __init__(self) -> None:
        self.queue_index = NOT_QUEUED
        self.queue_key = self.queue_before = self.queue_after = None


Item = TypeVar("Item", bound=Queueable)


class EvictionQueue(Generic[Item]):
    """Candidates for eviction, in two parts; each of them knows where it waits.

    What arrives with the largest key so far joins the *run*, a ring of links between the items themselves: there a change
    costs the same however many wait. With LRU that is what was just made or used. The others (a parent that became
    a leaf, a lock given back, policies with keys that do not grow with time) wait in an indexed binary *heap*.

    Chosen over a heap alone: its sifting was most of the cost of a bulk eviction; over a lazy heap, which pays for all
    nodes touched since the last eviction at once, in the middle of a request; over a list alone, which cannot take
    back an old node at its place, nor sort by anything but the time of insertion; and over links in an `OrderedDict`,
    its table is memory that no lookup has touched: among 100,000 nodes its cache misses were a twelfth of a match.

    Invariants:
        - `item.queue_key` and `keys[i]` are what the policy says of `item` in the run and of `items[i]`.
        - Keys of the run never fall, and none is larger than `highest`; no key of the heap is smaller than its parent's.
        - `items[i].queue_index == i`; in the run it is `_IN_RUN`, outside `NOT_QUEUED`.
        - The ring goes from `ends` through `run_length` items back to `ends`, the same way in both directions. Items
          outside have no neighbours, so that a dropped one keeps none alive.

    Complexity: O(1) in the run, O(log n) at worst in the heap.
    """

    def __init__(self, policy: Callable[[Item], EvictionKey]) -> None:
        self._policy = policy
        self._ends = Queueable()
        self._ends.queue_before = self._ends.queue_after = self._ends
        self._run_length = 0
        self._highest: Any = None
        self._keys: list[Any] = []
        self._items: list[Item] = []

    def __len__(self) -> int:
        return self._run_length + len(self._items)

    def __iter__(self) -> Iterator[Item]:
        return chain(self._in_run(), self._items)

    def add(self, item: Item) -> None:
        """Make an item that is not queued a candidate."""
        key = self._policy(item)
        if self._run_length and key < self._highest:
            self._keys.append(key)
            self._items.append(item)
            item.queue_index = len(self._items) - 1
            self._sift_up(item.queue_index)
            return
        item.queue_index = _IN_RUN
        item.queue_key = self._highest = key
        ends = self._ends
        item.queue_before = last = ends.queue_before
        item.queue_after = ends
        last.queue_after = ends.queue_before = item
        self._run_length += 1

    def update(self, item: Item) -> None:
        """Restore the order after the policy's key of a queued item changed."""
        key = self._policy(item)
        if item.queue_index == _IN_RUN:
            if not key < self._highest:
                self._move_to_end(item)
                item.queue_key = self._highest = key
                return
            if item.queue_key == key:
                return
        elif not self._run_length or key < self._highest:
            self._keys[item.queue_index] = key
            self._restore(item.queue_index)
            return
        self.remove(item)
        self.add(item)

    def remove(self, item: Item) -> None:
        """Withdraw a queued item."""
        hole, item.queue_index = item.queue_index, NOT_QUEUED
        if hole == _IN_RUN:
            before, after = item.queue_before, item.queue_after
            before.queue_after, after.queue_before = after, before
            item.queue_before = item.queue_after = None
            self._run_length -= 1
            return
        last_key, last = self._keys.pop(), self._items.pop()
        if last is not item:
            self._place(hole, last_key, last)
            self._restore(hole)

    def first(self) -> Item:
        """The item with the smallest key; the queue is not empty."""
        if not self._run_length:
            return self._items[0]
        oldest: Item = self._ends.queue_after
        return self._items[0] if self._items and self._keys[0] < oldest.queue_key else oldest

    def pop(self) -> Item:
        """Withdraw and return the item with the smallest key; the queue is not empty."""
        item = self.first()
        self.remove(item)
        return item

    def clear(self) -> None:
        """Withdraw all candidates; each may be added again."""
        for item in list(self):
            item.queue_index = NOT_QUEUED
            item.queue_before = item.queue_after = None
        self.rebuild()

    def rebuild(self) -> None:
        """Forget all candidates without looking at them: they are never added again."""
        self._ends.queue_before = self._ends.queue_after = self._ends
        self._run_length = 0
        self._keys.clear()
        self._items.clear()

    def check(self) -> None:
        """Verify the invariants; raises `CorruptCacheError`."""
        if len(self._keys) != len(self._items):
            raise CorruptCacheError(f"{len(self._keys)} keys for {len(self._items)} nodes in the eviction queue")
        for index, (key, item) in enumerate(zip(self._keys, self._items, strict=True)):
            self._check_item(item, index, key)
            if item.queue_before is not None or item.queue_after is not None:
                raise CorruptCacheError(f"node at {index} of the eviction queue has neighbours in its run")
            if index and key < self._keys[(index - 1) // 2]:
                raise CorruptCacheError(f"the eviction queue is out of order at {index}")
        self._check_run()

    def _check_run(self) -> None:
        """Verify links and order of the run."""
        before: Any = self._ends
        length = 0
        for item in self._in_run():
            length += 1
            if item.queue_before is not before or length > self._run_length:
                raise CorruptCacheError("the run of the eviction queue has broken links")
            self._check_item(item, _IN_RUN, item.queue_key)
            if (length > 1 and item.queue_key < before.queue_key) or self._highest < item.queue_key:
                raise CorruptCacheError(f"the run of the eviction queue is out of order at key {item.queue_key}")
            before = item
        if self._ends.queue_before is not before or length != self._run_length:
            raise CorruptCacheError("the run of the eviction queue has broken links")

    def _in_run(self) -> Iterator[Item]:
        """Yield what waits in the run, the next to leave first."""
        item = self._ends.queue_after
        while item is not self._ends:
            yield item
            item = item.queue_after

    def _move_to_end(self, item: Item) -> None:
        """Let an item of the run leave last."""
        ends, after = self._ends, item.queue_after
        if after is ends:
            return
        before, last = item.queue_before, ends.queue_before
        before.queue_after, after.queue_before = after, before
        item.queue_before, item.queue_after = last, ends
        last.queue_after = ends.queue_before = item

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
