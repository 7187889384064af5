"""Window slots of requests: taken piece by piece in front of the rows to compute, given back behind them.

Of a request's positions, `[start, stop)` have a window slot:

    [0, start)            given back, or never had
    [start, prefix_len)   of the cached prefix; kept with the lock on its window until the request is past it
    [.., stop)            the request's own: computed, about to be computed, or grafted

A row at position p reads the K/V of window layers at `[p - W + 1, p]` and nowhere else. So, while positions are computed in
ascending order, nobody needs a slot below `stop - W`. A grafted prompt is not computed in order: a policy may have any reused
token computed again, whose row looks one window back. It holds the slots of all its positions until its prompt is computed.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.errors import CapacityError
from kvgraft.memory import KVBlock, Owner
from kvgraft.prefix.swa.node import SWALock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from kvgraft.engine.hybrid_space import HybridKVSpace
    from kvgraft.engine.kv_space import PrefixLock
    from kvgraft.engine.request import RequestCache

logger = logging.getLogger(__name__)

_DECODE_TOKENS = 16
"""Window slots that a stream takes at a time; it gives back as many. Bounds what it holds beyond its window."""
_MIN_PIECE_TOKENS = 512
"""A piece of prefill takes free slots, and has cached windows evicted for this many rows, or one window, at most."""


@dataclass(frozen=True, slots=True)
class CapturedWindows:
    """K/V of window layers of positions `[start, stop)`, in the host store under `name`."""

    start: int
    stop: int
    name: str


@dataclass(slots=True, eq=False)
class WindowRow:
    """Window slots of one request.

    Attributes:
        swa_indices: int64, slot of each position, -1 where there is none; as long as the row of full slots. Written in place.
        prefix_len: Positions that came from the prefix cache.
        start: First position with a slot.
        stop: First position behind `start` without one.
        registered_len: Positions below it are donors already, or never will be.
        captured: What left the window since, on the host.
        is_donor: Whether the request's text is to become a donor.
    """

    swa_indices: NDArray[np.int64]
    prefix_len: int
    start: int
    stop: int
    registered_len: int
    is_donor: bool
    captured: list[CapturedWindows] = field(default_factory=list)


class RequestWindows:
    """Moves the windows of requests over their sequences. Not thread-safe.

    Attributes:
        num_errors: Captures that failed; the text in question does not become a donor.

    Invariant: what a lock covers is held by the request that locked it, so whatever no request holds can be evicted.
    """

    def __init__(self, space: HybridKVSpace) -> None:
        self.num_errors = 0
        self._space = space
        self._window = space.sliding_window_size

    @property
    def longest_piece(self) -> int:
        """Rows of one sequence for which there is always room if it runs alone."""
        return self._window

    def adopt(self, cache: RequestCache, swa_indices: NDArray[np.int64], *, is_donor: bool) -> None:
        """Begin with the window of the exact prefix, locked by `cache.lock`.

        Args:
            cache: With the slots of its exact prefix only.
            swa_indices: Window slots of the prefix, -1 where they are gone.
            is_donor: Whether the request's text is to become a donor.
        """
        stop = len(swa_indices)
        start = stop if cache.lock is None else window_of(cache.lock)
        row = np.array(swa_indices, dtype=np.int64)
        row[:start] = -1
        self._space.windows.retain(row[start:], Owner.REQUEST)
        cache.windows = WindowRow(row, stop, start, stop, stop, is_donor)

    def widen(self, cache: RequestCache) -> None:
        """Follow `cache.kv_indices` when it has grown."""
        row = _row(cache)
        missing = len(cache.kv_indices) - len(row.swa_indices)
        row.swa_indices = np.concatenate([row.swa_indices, np.full(missing, -1)])

    def require_room(self, cache: RequestCache, num_tokens: int) -> None:
        """Raise `CapacityError` unless the request can begin to compute `num_tokens` positions."""
        needed = min(num_tokens - _row(cache).stop, self._window + _DECODE_TOKENS)
        if needed > self._space.available_windows:
            raise CapacityError(
                f"{needed} slots of window layers are needed and {self._space.available_windows} are not in use by running "
                "requests; wait, or raise num_slots"
            )

    def fill(self, cache: RequestCache, num_tokens: int) -> None:
        """Take slots for all positions up to `num_tokens`, for a graft.

        Raises:
            CapacityError: There are not enough.
        """
        self._take(_row(cache), num_tokens)

    def reserve(self, cache: RequestCache, positions: NDArray[np.int64]) -> int:
        """Take slots for the rows at `positions`, ascending; returns for how many of them there are slots now, maybe none.

        What the request itself has left behind is given back first, then cached windows leave.
        """
        row = _row(cache)
        missing = int(positions[-1]) + 1 - row.stop
        if missing <= 0:
            return len(positions)
        if missing > self._space.windows.free_size:
            self.advance(cache, row.stop)
            evictable = min(self._space.available_windows, max(self._window, _MIN_PIECE_TOKENS))
            missing = min(missing, max(self._space.windows.free_size, evictable))
        self._take(row, row.stop + missing)
        return int(np.searchsorted(positions, row.stop))

    def grow(self, cache: RequestCache, num_tokens: int) -> None:
        """See to it that `num_tokens` positions have had slots; all behind the present ones are computed.

        Raises:
            CapacityError: There are not enough.
        """
        row = _row(cache)
        missing = num_tokens - row.stop
        if missing <= 0:
            return
        self.advance(cache, row.stop)
        ahead = min(max(missing, _DECODE_TOKENS), len(row.swa_indices) - row.stop)
        self._take(row, row.stop + max(missing, min(ahead, self._space.available_windows)))

    def advance(self, cache: RequestCache, num_computed: int) -> None:
        """Give back what no row behind the first `num_computed` positions can see; captures it if it is to be a donor."""
        row = _row(cache)
        frontier = min(num_computed - self._window, row.stop)
        if frontier <= row.start or frontier < row.prefix_len:
            return
        self._capture(cache, frontier)
        if row.start < row.prefix_len:
            assert cache.lock is not None, "a prefix is locked while its window is held"
            self._space.unlock_windows(cache.lock)
        self._space.windows.release(row.swa_indices[row.start : frontier], Owner.REQUEST)
        row.swa_indices[row.start : frontier] = -1
        row.start = frontier

    def release(self, cache: RequestCache) -> None:
        """Give everything back; the lock is the caller's to release."""
        row = _row(cache)
        self.forget_captured(cache)
        self._space.windows.release(row.swa_indices[row.start : row.stop], Owner.REQUEST)
        row.swa_indices[:] = -1
        row.start = row.stop = 0

    def forget_captured(self, cache: RequestCache) -> None:
        """Drop what was captured so far."""
        row = _row(cache)
        for part in row.captured:
            self._space.drop_captured(part.name)
        row.captured.clear()

    def known_parts(self, cache: RequestCache, start: int, stop: int) -> Iterator[tuple[int, KVBlock]]:
        """Yield K/V of window layers within `[start, stop)`, captured or still in slots, run by run: position and block."""
        row = _row(cache)
        parts = [(part.start, part.stop, part.name) for part in row.captured]
        parts.append((row.start, row.stop, ""))
        run: list[KVBlock] = []
        run_start = run_stop = start
        for first, last, name in parts:
            low, high = max(first, start), min(last, stop)
            if low >= high:
                continue
            if low != run_stop and run:
                yield run_start, KVBlock.join(run)
                run = []
            if not run:
                run_start = low
            run.append(
                self._space.host.get(name, low - first, high - low)
                if name
                else self._space.export_windows(row.swa_indices[low:high])
            )
            run_stop = high
        if run:
            yield run_start, KVBlock.join(run)

    def _capture(self, cache: RequestCache, frontier: int) -> None:
        row = _row(cache)
        start = max(row.start, row.registered_len)
        if not row.is_donor or start >= frontier or cache.epoch != self._space.epoch:
            return
        name = f"window layers of {cache.request.request_id} from {start}"
        try:
            if self._space.capture(name, row.swa_indices[start:frontier]):
                row.captured.append(CapturedWindows(start, frontier, name))
        except Exception:
            self.num_errors += 1
            logger.exception("window layers of request %s are not kept for a donor", cache.request.request_id)

    def _take(self, row: WindowRow, stop: int) -> None:
        if stop <= row.stop:
            return
        after = int(row.swa_indices[row.stop - 1]) if row.stop > row.start else None
        row.swa_indices[row.stop : stop] = self._space.allocate_windows(stop - row.stop, after=after)
        row.stop = stop


def window_of(lock: PrefixLock) -> int:
    """First position of the window that a lock on a hybrid tree covers."""
    assert isinstance(lock.receipt, SWALock), "only hybrid trees lock windows"
    return lock.receipt.swa_start


def _row(cache: RequestCache) -> WindowRow:
    assert cache.windows is not None, "requests of a hybrid model have window slots"
    return cache.windows
