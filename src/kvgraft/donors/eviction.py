"""In which order donors leave: Greedy-Dual-Size-Frequency over a lazy heap."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from kvgraft.errors import CorruptCacheError
from kvgraft.types import DonorId

if TYPE_CHECKING:
    from collections.abc import Iterator

_Entry = tuple[float, int, DonorId]
"""Priority, order of the change, donor."""


class DonorQueue:
    """Donors by priority: `clock + value`, value being what a donor saves per token that it occupies.

    The clock rises to the priority of what leaves, so that a donor which saved much but long ago is overtaken by what
    is newer. Of equal priorities the one that changed first leaves first; without hits that is first in, first out.

    The heap keeps outdated entries until they surface or outnumber the donors.

    Source: L. Cherkasova, "Improving WWW proxies performance with Greedy-Dual-Size-Frequency caching policy",
    HP Labs HPL-98-69R1, 1998.

    Complexity: `put` and `pop` O(log n) amortised, `discard` O(1), iteration O(k log k) for the first k.
    """

    def __init__(self) -> None:
        self._clock = 0.0
        self._num_changes = 0
        self._entries: dict[DonorId, _Entry] = {}
        self._heap: list[_Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, donor_id: DonorId) -> bool:
        return donor_id in self._entries

    def __iter__(self) -> Iterator[DonorId]:
        """Yield donors, lowest priority first. The queue must not change meanwhile."""
        heap = self._heap
        frontier = [(heap[0], 0)] if heap else []
        while frontier:
            entry, index = heappop(frontier)
            if self._entries.get(entry[2]) == entry:
                yield entry[2]
            for child in (2 * index + 1, 2 * index + 2):
                if child < len(heap):
                    heappush(frontier, (heap[child], child))

    def put(self, donor_id: DonorId, value: float) -> None:
        """Add a donor, or give it a new value as of now."""
        self._num_changes += 1
        entry = (self._clock + value, self._num_changes, donor_id)
        heappush(self._heap, entry)
        self._entries[donor_id] = entry
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = list(self._entries.values())
            heapify(self._heap)

    def discard(self, donor_id: DonorId) -> None:
        """Take a donor out, if it is in."""
        self._entries.pop(donor_id, None)

    def pop(self) -> DonorId:
        """Take out the donor of lowest priority and advance the clock to it; the queue is not empty."""
        while True:
            entry = heappop(self._heap)
            priority, _, donor_id = entry
            if self._entries.get(donor_id) == entry:
                del self._entries[donor_id]
                self._clock = max(self._clock, priority)
                return donor_id

    def clear(self) -> None:
        """Take all donors out."""
        self._entries.clear()
        self._heap.clear()

    def check(self) -> None:
        """Verify that every donor has its entry in a heap that is in order; raises `CorruptCacheError`."""
        if not set(self._entries.values()) <= set(self._heap):
            raise CorruptCacheError("a donor is missing in the heap of the eviction queue")
        if any(self._heap[(i - 1) // 2] > self._heap[i] for i in range(1, len(self._heap))):
            raise CorruptCacheError("the heap of the eviction queue is out of order")
