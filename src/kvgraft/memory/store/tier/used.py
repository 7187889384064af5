"""One store as an engine uses it: its threads, their results, and how long it is left alone when it is too slow."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from kvgraft.memory.store.record import StoreNews
from kvgraft.memory.store.tier.feed import StoreFeed
from kvgraft.memory.store.tier.reader import StoreReader
from kvgraft.memory.store.tier.touches import Touches
from kvgraft.memory.store.tier.writer import StoreWriter
from kvgraft.types import StoreCounts

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from kvgraft.memory.store.base import KVStore
    from kvgraft.memory.store.layout import RowLayout

_FIRST_REST_S, _LONGEST_REST_S = 0.5, 20.0
_WRITES = ("stored", "known", "dropped", "refused", "failed")


class UsedStore:
    """A store with writer, reader and feed for one space at a time. Not thread-safe; its threads are its own.

    A store with reads that come too late is left alone for a time that doubles: each of them has cost a request its patience.

    Attributes:
        store: The store; open until its owner closes it.
        writer: Writes after requests.
        reader: Reads for requests.
        feed: Looks what is there; None for an engine, or a rank, that leaves this to another.
    """

    def __init__(
        self,
        store: KVStore,
        space: str,
        layout: RowLayout,
        *,
        looks_into: Sequence[str],
        max_queued_bytes: int,
        max_pending_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin.

        Args:
            store: Which.
            space: Of this engine, or of this rank.
            layout: Of its K/V.
            looks_into: Spaces of all ranks, all of which must have a donor; none for no feed.
            max_queued_bytes: K/V that may wait to be written, unless a single donor has more.
            max_pending_bytes: K/V that may be on their way from the store, likewise.
            clock: Seconds.
        """
        self.store = store
        self._clock = clock
        self._max_queued_bytes, self._max_pending_bytes = max_queued_bytes, max_pending_bytes
        self._is_open = False
        self._num_late = 0
        self._rest_s = 0.0
        self._rests_until = -math.inf
        self._past = StoreCounts(store.name)
        self._touches = Touches(store)
        self._start(space, layout, looks_into)

    def enter(self, space: str, layout: RowLayout, looks_into: Sequence[str]) -> None:
        """Leave the present space, with what is under way there, for another."""
        self.leave()
        self._start(space, layout, looks_into)

    def leave(self) -> None:
        """Read, write and look no more until `enter`; what waits to be written is not."""
        if self._is_open:
            self._past, self._is_open, self._num_late = self.counts(), False, 0
            self._stop(0.0)

    def _start(self, space: str, layout: RowLayout, looks_into: Sequence[str]) -> None:
        self._space, self._is_open = space, True
        self.writer = StoreWriter(self.store, space, layout, max_queued_bytes=self._max_queued_bytes)
        self.reader = StoreReader(
            self.store, space, layout, max_pending_bytes=self._max_pending_bytes, clock=self._clock
        )
        self.feed = StoreFeed(self.store, looks_into) if looks_into else None

    def news(self, limit: int) -> StoreNews:
        """See `StoreFeed.news`; nothing without a feed."""
        return StoreNews() if self.feed is None else self.feed.news(limit)

    def forget(self, keys: Collection[str]) -> None:
        """See `StoreFeed.forget`."""
        if self.feed is not None:
            self.feed.forget(keys)

    def touch(self, key: str) -> None:
        """Report the use of an object to the store, on a thread."""
        self._touches.report([self._space], [key])

    def expected_s(self, length: int) -> float:
        """Expected seconds to read so many tokens of one donor; infinite while the store is left alone."""
        return math.inf if self._clock() < self._rests_until else self.reader.expected_s(length)

    def was_late(self) -> None:
        """Note that a read did not come in time."""
        self._num_late += 1
        self.reader.was_late()
        self._rest_s = min(max(2 * self._rest_s, _FIRST_REST_S), _LONGEST_REST_S)
        self._rests_until = self._clock() + self._rest_s

    def was_in_time(self) -> None:
        """Note that a read came in time."""
        self._rest_s = 0.0

    def counts(self) -> StoreCounts:
        """What it has done so far, in all spaces."""
        if not self._is_open:
            return self._past
        reads, writes, past = self.reader.counters, self.writer.counters, self._past
        outcomes = {
            "hit": reads.hits,
            "missing": reads.missing,
            "corrupt": reads.corrupt,
            "failed": reads.failed,
            "refused": reads.refused,
            "cancelled": reads.cancelled,
            "late": self._num_late,
        }
        fates = {name: getattr(writes, name) for name in _WRITES}
        return StoreCounts(
            self.store.name,
            {name: count + past.reads.get(name, 0) for name, count in outcomes.items()},
            reads.num_bytes + past.read_bytes,
            {name: count + past.writes.get(name, 0) for name, count in fates.items()},
            writes.num_bytes + past.written_bytes,
            self.reader.is_failing,
            (0 if self.feed is None else self.feed.num_errors) + past.failed_looks,
        )

    def stop(self, timeout_s: float) -> None:
        """End the threads; the writer may go on for `timeout_s`. The store stays open."""
        self._touches.close()
        self._stop(timeout_s)

    def _stop(self, timeout_s: float) -> None:
        if self.feed is not None:
            self.feed.close()
        self.reader.close()
        self.writer.close(timeout_s)
