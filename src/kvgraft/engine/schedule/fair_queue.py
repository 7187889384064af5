"""A queue that is fair between tenants: each gets the same share of prompt tokens; one that sends more waits longer.

Start-time fair queueing (Goyal, Vin, Cheng 1996): an item's start tag is the later of the queue's virtual time and the
tenant's last finish tag; its finish tag adds the item's cost; the lowest start tag is served. Virtual time advances by the
work served per queued tenant, so that an endless row of new tenants cannot starve an old one. With one tenant it is a FIFO.
An item that is removed has cost nothing: those of its tenant behind it move up.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from kvgraft.errors import CorruptCacheError

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T")


@dataclass(order=True, frozen=True, slots=True)
class _Turn:
    start: float
    number: int


@dataclass(frozen=True, slots=True)
class _Queued(Generic[T]):
    """An item; `arrival` is the virtual time when it was queued."""

    item: T
    tenant: str | None
    cost: float
    arrival: float = 0.0


class FairQueue(Generic[T]):
    """Items by tenant. Push and pop are O(log n) amortised. Not thread-safe."""

    def __init__(self) -> None:
        self._heap: list[_Turn] = []
        self._queued: dict[int, _Queued[T]] = {}
        self._tenants: Counter[str | None] = Counter()
        self._finish: dict[str, float] = {}
        self._now = 0.0
        self._next = 0
        self._first = 0

    def __len__(self) -> int:
        return len(self._queued)

    def __iter__(self) -> Iterator[T]:
        """Yield all items, in no particular order."""
        return (queued.item for queued in self._queued.values())

    def push(self, item: T, tenant: str, cost: float) -> None:
        """Queue `item` for `tenant`; `cost` is the work it asks for."""
        start = max(self._now, self._finish.get(tenant, 0.0))
        self._finish[tenant] = start + cost
        self._next += 1
        self._add(_Queued(item, tenant, cost, self._now), _Turn(start, self._next))

    def push_front(self, item: T) -> None:
        """Queue `item` before all others: it was served already and lost its place."""
        self._first -= 1
        self._add(_Queued(item, None, 0.0), _Turn(float("-inf"), self._first))

    def peek(self) -> T:
        """Return the item that `pop` would take; IndexError if there is none."""
        return self._queued[self._heap[0].number].item

    def pop(self) -> T:
        """Take the next item; IndexError if there is none."""
        entry = heapq.heappop(self._heap)
        queued = self._queued[entry.number]
        self._now = max(self._now, entry.start) + queued.cost / len(self._tenants)
        self._take(entry.number)
        return queued.item

    def remove(self, item: T) -> None:
        """Take `item` out wherever it stands. O(n log n). Raises KeyError if it is not queued."""
        number = next((number for number, queued in self._queued.items() if queued.item is item), None)
        if number is None:
            raise KeyError("not queued")
        tenant, turns = self._queued[number].tenant, {turn.number: turn for turn in self._heap}
        gone = turns.pop(number)
        if tenant is not None:
            self._move_up(tenant, gone, turns)
        self._heap = list(turns.values())
        heapq.heapify(self._heap)
        self._take(number)

    def check(self) -> None:
        """Verify that every item has one turn, and is counted for its tenant; raises `CorruptCacheError`."""
        if sorted(turn.number for turn in self._heap) != sorted(self._queued):
            raise CorruptCacheError(f"{len(self._queued)} items are queued and {len(self._heap)} have a turn")
        if Counter(queued.tenant for queued in self._queued.values()) != self._tenants:
            raise CorruptCacheError("queued items are not counted by tenant")

    def _move_up(self, tenant: str, gone: _Turn, turns: dict[int, _Turn]) -> None:
        """Give the items of a tenant behind one that leaves unserved the turns that they would have had without it."""
        finish = gone.start
        for number in sorted(turns):
            queued = self._queued[number]
            if number > gone.number and queued.tenant == tenant:
                turns[number] = _Turn(max(queued.arrival, finish), number)
                finish = turns[number].start + queued.cost
        self._finish[tenant] = finish

    def _add(self, queued: _Queued[T], entry: _Turn) -> None:
        self._queued[entry.number] = queued
        self._tenants[queued.tenant] += 1
        heapq.heappush(self._heap, entry)

    def _take(self, number: int) -> None:
        tenant = self._queued.pop(number).tenant
        self._tenants[tenant] -= 1
        if not self._tenants[tenant]:
            del self._tenants[tenant]
        if len(self._finish) > 2 * len(self._queued) + 16:
            # A tenant with a finish tag in the past starts at the virtual time anyway.
            self._finish = {name: finish for name, finish in self._finish.items() if finish > self._now}
