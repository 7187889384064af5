"""A pool of slot numbers that notices what corrupts a real one: double frees, foreign slots, leaks. It has no memory."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from kvgraft.prefix import SlotArray


class CheckedSlots:
    """Slots `[first, first + size)`; the lowest free ones are given first."""

    def __init__(self, size: int, first: int = 0) -> None:
        self.size = size
        self._range = range(first, first + size)
        self._free = set(self._range)
        self._heap = list(self._range)
        heapify(self._heap)

    @property
    def available(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def alloc(self, num_slots: int) -> SlotArray | None:
        """Give `num_slots` slots, or None if there are fewer."""
        if num_slots > self.available:
            return None
        slots = [heappop(self._heap) for _ in range(num_slots)]
        self._free.difference_update(slots)
        return np.array(slots, dtype=np.int64)

    def free(self, slots: SlotArray) -> None:
        """Take slots back; raises `AssertionError` for a slot that is free already, given twice or not of this pool."""
        numbers = np.asarray(slots).tolist()
        assert len(set(numbers)) == len(numbers), "the same slot is freed twice at once"
        assert self._free.isdisjoint(numbers), "a slot is freed twice"
        assert all(number in self._range for number in numbers), "a foreign slot is freed"
        self._free.update(numbers)
        for number in numbers:
            heappush(self._heap, number)
