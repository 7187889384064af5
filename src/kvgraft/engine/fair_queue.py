"""A queue that is fair between tenants: each gets the same share of prompt tokens, whoever sends more waits longer.

Start-time fair queueing (Goyal, Vin, Cheng 1996): an item's start tag is the later of the queue's virtual time and the
tenant's last finish tag; its finish tag adds the item's cost; the lowest start tag is served. With one tenant it is a FIFO.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(order=True, frozen=True, slots=True)
class _Entry:
    start: float
    number: int


class FairQueue(Generic[T]):
    """Items by tenant. Push, pop and remove are O(log n) amortised. Not thread-safe."""

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._items: dict[int, T] = {}
        self._finish: dict[str, float] = {}
        self._now = 0.0
        self._next = 0
        self._first = 0

    def __len__(self) -> int:
        return len(self._items)

    def push(self, item: T, tenant: str, cost: float) -> None:
        """Queue `item` for `tenant`; `cost` is the work it asks for."""
        start = max(self._now, self._finish.get(tenant, 0.0))
        self._finish[tenant] = start + cost
        self._next += 1
        self._add(item, start, self._next)

    def push_front(self, item: T) -> None:
        """Queue `item` before all others: it was served already and lost its place."""
        self._first -= 1
        self._add(item, float("-inf"), self._first)

    def peek(self) -> T:
        """The item that `pop` would return; IndexError if there is none."""
        self._drop_removed()
        return self._items[self._heap[0].number]

    def pop(self) -> T:
        """Take the item whose turn it is; IndexError if there is none."""
        self._drop_removed()
        entry = heapq.heappop(self._heap)
        self._now = max(self._now, entry.start)
        item = self._items.pop(entry.number)
        self._forget_idle_tenants()
        return item

    def remove(self, item: T) -> None:
        """Take `item` out wherever it stands. O(n). Raises KeyError if it is not queued."""
        number = next((number for number, queued in self._items.items() if queued is item), None)
        if number is None:
            raise KeyError("not queued")
        del self._items[number]

    def drain(self) -> list[T]:
        """Take everything, in order."""
        return [self.pop() for _ in range(len(self))]

    def _add(self, item: T, start: float, number: int) -> None:
        self._items[number] = item
        heapq.heappush(self._heap, _Entry(start, number))

    def _drop_removed(self) -> None:
        while self._heap and self._heap[0].number not in self._items:
            heapq.heappop(self._heap)

    def _forget_idle_tenants(self) -> None:
        """A tenant whose finish tag has passed starts at the virtual time anyway."""
        if len(self._finish) > 2 * len(self._items) + 16:
            self._finish = {tenant: finish for tenant, finish in self._finish.items() if finish > self._now}
