"""The free slots of a pool as sorted runs: who asks for many gets them in one piece if there is one."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvgraft.errors import CorruptCacheError

if TYPE_CHECKING:
    from collections.abc import Iterator

SlotArray = NDArray[np.int64]
"""1-D indices of KV slots, one per token."""


class FreeExtents:
    """Disjoint half-open runs `[start, end)` of free slots.

    Invariants:
        - `starts` and `ends` ascend; each run holds at least one slot.
        - Neighbouring runs do not touch: what could be one run is one.

    Complexity: e is the number of runs, not of slots; it stays near the number of requests while they come and go as a
    whole. Everything is vectorised.
    """

    def __init__(self, num_slots: int) -> None:
        self._starts = np.array([0], dtype=np.int64)
        self._ends = np.array([num_slots], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._starts)

    def take_at(self, start: int, limit: int) -> SlotArray:
        """Take up to `limit` slots of the run that begins exactly at `start`; none if there is no such run.

        Complexity: O(e).
        """
        index = int(self._starts.searchsorted(start))
        if index == len(self._starts) or self._starts[index] != start:
            return np.empty(0, dtype=np.int64)
        return self._take_front(index, limit)

    def take(self, num_slots: int) -> SlotArray:
        """Take `num_slots` free slots, ascending: the tightest run that holds them all, else the fewest runs.

        The caller has made sure that there are that many.

        Complexity: O(e), O(e log e) if no run is long enough.
        """
        index = self._tightest(num_slots)
        if index is not None:
            return self._take_front(index, num_slots)
        slots = self._take_longest(num_slots)
        missing = num_slots - len(slots)
        if missing:
            index = self._tightest(missing)
            assert index is not None, "the caller asked for more slots than are free"
            slots = np.concatenate([slots, self._take_front(index, missing)])
        slots.sort()
        return slots

    def give_back(self, slots: SlotArray) -> None:
        """Add distinct slots that are not free; runs that touch become one.

        Complexity: O(n log n + e) for n slots; O(n + e) where they ascend.
        """
        if not len(slots):
            return
        ordered = slots if (slots[1:] > slots[:-1]).all() else np.sort(slots)
        gaps = np.flatnonzero(ordered[1:] != ordered[:-1] + 1)
        new_starts = np.concatenate([ordered[:1], ordered[gaps + 1]])
        new_ends = np.concatenate([ordered[gaps], ordered[-1:]]) + 1
        places = self._starts.searchsorted(new_starts)
        starts = np.insert(self._starts, places, new_starts)
        ends = np.insert(self._ends, places, new_ends)
        apart = starts[1:] != ends[:-1]
        starts, ends = starts[np.concatenate([[True], apart])], ends[np.concatenate([apart, [True]])]
        self._starts, self._ends = starts, ends

    @contextmanager
    def undone_on_failure(self) -> Iterator[None]:
        """Free what was taken within if anything there fails: arrays of runs are replaced, never written to."""
        before = self._starts, self._ends
        try:
            yield
        except BaseException:
            self._starts, self._ends = before
            raise

    def slots(self) -> SlotArray:
        """All free slots, ascending. Complexity: O(free slots)."""
        return _expand(self._starts, self._ends)

    def check(self) -> None:
        """Verify the invariants.

        Raises:
            CorruptCacheError: A run is empty, out of order, or touches its neighbour.
        """
        if (self._starts >= self._ends).any() or (self._ends[:-1] >= self._starts[1:]).any():
            raise CorruptCacheError("free extents are empty, out of order or not merged")

    def _tightest(self, num_slots: int) -> int | None:
        """Index of the shortest run of at least `num_slots`, the first of several."""
        lengths = self._ends - self._starts
        fitting = np.flatnonzero(lengths >= num_slots)
        return int(fitting[lengths[fitting].argmin()]) if len(fitting) else None

    def _take_front(self, index: int, limit: int) -> SlotArray:
        """Take the first slots of a run, `limit` at most, and forget the run if that is all of it."""
        start, end = int(self._starts[index]), int(self._ends[index])
        stop = min(start + limit, end)
        slots = np.arange(start, stop)
        if stop == end:
            starts, ends = np.delete(self._starts, index), np.delete(self._ends, index)
            self._starts, self._ends = starts, ends
        else:
            starts = self._starts.copy()
            starts[index] = stop
            self._starts = starts
        return slots

    def _take_longest(self, num_slots: int) -> SlotArray:
        """Take whole runs, the longest first, as long as they stay within `num_slots`."""
        lengths = self._ends - self._starts
        order = np.argsort(-lengths, kind="stable")
        whole = order[: int(np.searchsorted(np.cumsum(lengths[order]), num_slots, side="right"))]
        slots = _expand(self._starts[whole], self._ends[whole])
        starts, ends = np.delete(self._starts, whole), np.delete(self._ends, whole)
        self._starts, self._ends = starts, ends
        return slots


def _expand(starts: SlotArray, ends: SlotArray) -> SlotArray:
    """List the slots of runs, run after run."""
    lengths = ends - starts
    offsets = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    return offsets + np.arange(len(offsets))
