"""K/V on their way out of a store: asynchronous, overlapping, verified page by page."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.errors import StoreError, StoreMissError, one_line
from kvgraft.memory.store.checksums import page_checksums
from kvgraft.memory.store.record import PAGE_TOKENS, decode_head
from kvgraft.memory.store.tier.buffers import ReadBuffers
from kvgraft.memory.store.tier.speed import ReadSpeed
from kvgraft.memory.store.tier.tasks import TaskThreads

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from kvgraft.memory.block import KVBlock
    from kvgraft.memory.store.base import KVStore
    from kvgraft.memory.store.layout import RowLayout
    from kvgraft.memory.store.record import Head

logger = logging.getLogger(__name__)

_THREADS = 2
_KNOWN_HEADS = 8192
_KNOWN_DAMAGED = 8192
_IDLE_BYTES = 64 << 20
"""Memory of reads that is kept for the next ones."""
_FIRST_REST_S, _LONGEST_REST_S = 0.1, 30.0
"""How long a store is left alone after a failure, and after many."""


class Fetch:
    """A span of a stored donor that is being read. Thread-safe.

    Attributes:
        key: Of the donor.
        start: First token.
        length: Number of tokens.
    """

    def __init__(self, key: str, start: int, length: int) -> None:
        self.key = key
        self.start = start
        self.length = length
        self._done = threading.Event()
        self._block: KVBlock | None = None
        self._error: StoreError | None = None
        self._is_cancelled = False

    @property
    def is_done(self) -> bool:
        """Whether it has arrived, failed or was given up."""
        return self._done.is_set()

    @property
    def is_cancelled(self) -> bool:
        """Whether it is no longer wanted."""
        return self._is_cancelled

    def wait(self, timeout_s: float) -> bool:
        """Wait until `is_done`; False if it takes longer."""
        return self._done.wait(timeout_s)

    def block(self) -> KVBlock:
        """The K/V, in host memory, verified; not written by others. Only when `is_done`.

        Raises:
            StoreError: It failed: `StoreMissError` if the store has it no more.
        """
        if self._error is not None:
            raise self._error
        if self._block is None:
            raise StoreError(f"{self.key} has not arrived yet")
        return self._block

    def cancel(self) -> None:
        """Cancel it; a read under way goes on and is dropped."""
        self._is_cancelled = True

    def succeed(self, block: KVBlock) -> None:
        """Called by the reader."""
        self._block = block
        self._done.set()

    def fail(self, error: StoreError) -> None:
        """Called by the reader."""
        self._error = error
        self._done.set()


@dataclass(slots=True)
class ReadCounters:
    """Fetches by what became of them, and the bytes of those that arrived.

    Attributes:
        hits: Arrived whole.
        missing: The store had it no more.
        corrupt: Pages or head did not pass; the object was removed.
        failed: The store failed.
        refused: Not begun: the store rests after failures, or too much is under way.
        cancelled: Given up before the read.
        num_bytes: Read and verified.
    """

    hits: int = 0
    missing: int = 0
    corrupt: int = 0
    failed: int = 0
    refused: int = 0
    cancelled: int = 0
    num_bytes: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Facts:
    """The part of a head that reads of spans need."""

    num_tokens: int
    checksums: NDArray[np.uint64]


class _CorruptError(StoreError):
    """The bytes read are not those written."""


class _CancelledError(StoreError):
    """The read is no longer wanted."""


class StoreReader:
    """Reads spans of one space. Thread-safe.

    A store that fails is left alone for a while that doubles with every failure, so that a dead one costs a deadline now and
    then and not with every request.
    """

    def __init__(
        self,
        store: KVStore,
        space: str,
        layout: RowLayout,
        *,
        max_pending_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare.

        Args:
            store: Where from.
            space: Of this engine, or of this rank.
            layout: Of its K/V.
            max_pending_bytes: K/V that may be on their way; fetches beyond it fail at once.
            clock: Seconds.
        """
        self.counters = ReadCounters()
        self.speed = ReadSpeed(clock)
        self._store = store
        self._space = space
        self._layout = layout
        self._max_pending_bytes = max_pending_bytes
        self._clock = clock
        self._buffers = ReadBuffers(min(max_pending_bytes, _IDLE_BYTES))
        self._threads = TaskThreads(f"kvgraft-{store.name}-reader", _THREADS)
        self._lock = threading.Lock()
        self._pending: set[Fetch] = set()
        self._pending_bytes = 0
        self._facts: dict[str, _Facts] = {}
        self._damaged: dict[str, None] = {}
        self._rest_s = 0.0
        self._rests_until = -np.inf
        self._is_late = False

    @property
    def is_failing(self) -> bool:
        """Whether the last read failed or did not come in time."""
        return self._rest_s > 0 or self._is_late

    def was_late(self) -> None:
        """Note that a read did not come in time."""
        self._is_late = True

    @property
    def is_resting(self) -> bool:
        """Whether the store is left alone after a failure."""
        return self._clock() < self._rests_until

    def expected_s(self, length: int, num_reads: int = 1) -> float:
        """Expected seconds to read so many tokens in so many spans, after what is under way; infinite while resting."""
        if self.is_resting:
            return float("inf")
        waiting = self._pending_bytes
        pages = num_reads + length // PAGE_TOKENS  # a span is rounded out to whole pages
        return self.speed.seconds(pages * PAGE_TOKENS * self._layout.bytes_per_token + waiting, num_reads)

    def fetch(self, key: str, start: int, length: int) -> Fetch:
        """Begin to read tokens `[start, start + length)` of a donor; never waits and never raises."""
        fetch = Fetch(key, start, length)
        num_bytes = length * self._layout.bytes_per_token
        with self._lock:
            is_full = self._pending_bytes and self._pending_bytes + num_bytes > self._max_pending_bytes
            if is_full or self.is_resting or self._threads.is_closed:
                self.counters.refused += 1
                fetch.fail(StoreError(f"{self._store.name} is not asked: it failed before, or too much is on its way"))
                return fetch
            self._pending_bytes += num_bytes
            self._pending.add(fetch)
        if not self._threads.submit(lambda: self._serve(fetch, num_bytes)):
            self._serve_not(fetch, num_bytes)
        return fetch

    def close(self) -> None:
        """End; what is under way fails, and is thrown away when it comes."""
        self._threads.close()
        with self._lock:
            pending, self._pending = self._pending, set()
            self.counters.cancelled += len(pending)
        for fetch in pending:
            fetch.fail(_CancelledError(f"{self._store.name} was closed"))

    def _serve_not(self, fetch: Fetch, num_bytes: int) -> None:
        """Fail a read that no thread takes; `close` may have done so already."""
        with self._lock:
            self._pending_bytes -= num_bytes
            if fetch not in self._pending:
                return
            self._pending.remove(fetch)
            self.counters.refused += 1
        fetch.fail(StoreError(f"{self._store.name} is not asked: no thread can be started for it"))

    def _serve(self, fetch: Fetch, num_bytes: int) -> None:
        block: KVBlock | None = None
        error: Exception | None = None
        try:
            _require_wanted(fetch)
            if fetch.key in self._damaged:
                raise StoreMissError(f"{fetch.key} in {self._store.name} is damaged and cannot be removed")  # noqa: TRY301
            block = self._read(fetch)
        except Exception as raised:  # noqa: BLE001 - on any failure the tokens are computed
            error = raised
        with self._lock:
            self._pending_bytes -= num_bytes
            if fetch not in self._pending:  # closed meanwhile
                return
            self._pending.remove(fetch)
            if error is None:
                self._rest_s, self._rests_until, self._is_late = 0.0, -np.inf, False
                self.counters.hits += 1
                self.counters.num_bytes += num_bytes
            else:
                self._count(error)
        if block is not None:
            fetch.succeed(block)
            return
        if isinstance(error, _CorruptError):
            logger.warning("%s; it is removed", error)
            self._remove(fetch.key)
        fetch.fail(error if isinstance(error, StoreError) else StoreError(one_line(error or StoreError(""))))

    def _read(self, fetch: Fetch) -> KVBlock:
        started, rows = self._clock(), None
        try:
            facts = self._facts.get(fetch.key)
            with contextlib.suppress(StoreMissError):
                rows = None if facts is None else self._rows(fetch, facts)
            if rows is None:  # nothing was known, or of an object that was lost, torn or put anew meanwhile
                rows = self._rows(fetch, self._learned(fetch.key))
        finally:
            num_bytes = fetch.length * self._layout.bytes_per_token if rows is None else rows.nbytes
            self.speed.observe(num_bytes, self._clock() - started)
        if rows is None:
            self._facts.pop(fetch.key, None)
            raise _CorruptError(f"pages of {fetch.key} in {self._store.name} are damaged")
        inner = fetch.start % PAGE_TOKENS
        return self._layout.unpack(rows[inner : inner + fetch.length])

    def _rows(self, fetch: Fetch, facts: _Facts) -> NDArray[np.uint8] | None:
        """Read the pages of a span; None if they have other checksums."""
        stop = fetch.start + fetch.length
        if stop > facts.num_tokens:
            raise StoreMissError(f"{fetch.key} has {facts.num_tokens} tokens, not {stop}")
        first = fetch.start // PAGE_TOKENS
        stop = min(-(-stop // PAGE_TOKENS) * PAGE_TOKENS, facts.num_tokens)
        rows = self._buffers.rows(stop - first * PAGE_TOKENS, self._layout.bytes_per_token)
        offset = first * PAGE_TOKENS * self._layout.bytes_per_token
        self._store.read(self._space, fetch.key, offset, rows.data.cast("B"))
        sums = page_checksums(rows, fetch.key, first)
        return rows if np.array_equal(sums, facts.checksums[first : first + len(sums)]) else None

    def _learned(self, key: str) -> _Facts:
        """Read a head, and keep what reads of spans need of it: one request less for each that follows."""
        _, raw = next(iter(self._store.heads(self._space, [key])))
        if raw is None:
            raise StoreMissError(f"{self._store.name} has no {key} any more")
        head = _decoded(raw, self._space, key)
        if head.layout != self._layout.description or head.bytes_per_token != self._layout.bytes_per_token:
            raise _CorruptError(f"{key} in {self._store.name} has another layout")
        facts = self._facts[key] = _Facts(head.record.num_tokens, head.checksums)
        while len(self._facts) > _KNOWN_HEADS:
            self._facts.pop(next(iter(self._facts)), None)
        return facts

    def _count(self, error: Exception) -> None:
        """Count what became of a fetch; the lock is held."""
        if isinstance(error, _CancelledError):
            self.counters.cancelled += 1
        elif isinstance(error, StoreMissError):
            self.counters.missing += 1
        elif isinstance(error, _CorruptError):
            self.counters.corrupt += 1
        else:
            self.counters.failed += 1
            self._rest_s = min(max(2 * self._rest_s, _FIRST_REST_S), _LONGEST_REST_S)
            self._rests_until = self._clock() + self._rest_s
            logger.warning(
                "%s failed and is left alone for %.1f s: %s", self._store.name, self._rest_s, one_line(error)
            )

    def _remove(self, key: str) -> None:
        """Remove a damaged object; one that cannot go, from a read-only volume say, is never read again."""
        try:
            self._store.remove(self._space, key)
        except Exception as error:  # noqa: BLE001 - on any failure the object stays
            logger.warning("%s cannot be removed from %s: %s", key, self._store.name, one_line(error))
            self._damaged[key] = None
            while len(self._damaged) > _KNOWN_DAMAGED:
                self._damaged.pop(next(iter(self._damaged)), None)


def _require_wanted(fetch: Fetch) -> None:
    if fetch.is_cancelled:
        raise _CancelledError(f"{fetch.key} is not wanted any more")


def _decoded(raw: bytes, space: str, key: str) -> Head:
    """Decode a head; one that cannot be is corrupt, which is no failure of the store."""
    try:
        return decode_head(raw, space, key)
    except StoreError as error:
        raise _CorruptError(str(error)) from error
