"""Donors on their way into a store, after the requests that computed them."""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvgraft.errors import CapacityError, StoreError, one_line
from kvgraft.memory.store.checksums import page_checksums
from kvgraft.memory.store.record import MOST_TOKENS, decode_head, encode_head
from kvgraft.memory.store.tier.tasks import TaskThreads

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvgraft.memory.block import KVBlock
    from kvgraft.memory.store.base import KVStore
    from kvgraft.memory.store.layout import RowLayout
    from kvgraft.memory.store.record import DonorRecord

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Written:
    """The fate of a donor that was offered.

    Attributes:
        key: Of its record.
        is_stored: Whether the store has it now; it may have had it before.
    """

    key: str
    is_stored: bool


@dataclass(slots=True)
class WriteCounters:
    """Donors that were offered to a store, by what became of them.

    Attributes:
        stored: Written.
        known: The store had them.
        dropped: The queue was full, or closed, or their K/V were gone before their turn.
        refused: The store was full.
        failed: The store, or reading the K/V, failed.
        num_bytes: Bytes written.
    """

    stored: int = 0
    known: int = 0
    dropped: int = 0
    refused: int = 0
    failed: int = 0
    num_bytes: int = 0


class StoreWriter:
    """Writes on a thread of its own. `offer` and `take_written` are called by one thread, the engine's."""

    def __init__(self, store: KVStore, space: str, layout: RowLayout, *, max_queued_bytes: int) -> None:
        """Prepare.

        Args:
            store: Where to.
            space: Of this engine, or of this rank.
            layout: Of its K/V.
            max_queued_bytes: K/V that may wait; donors beyond it are not stored.
        """
        self.counters = WriteCounters()
        self._store = store
        self._space = space
        self._layout = layout
        self._max_queued_bytes = max_queued_bytes
        self._threads = TaskThreads(f"kvgraft-{store.name}-writer")
        self._written: deque[Written] = deque()
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._queued_bytes = self._num_queued = 0

    @property
    def queued_bytes(self) -> int:
        """K/V that wait or are being written."""
        return self._queued_bytes

    def offer(self, record: DonorRecord, read: Callable[[], KVBlock | None]) -> bool:
        """Store a donor soon.

        Args:
            record: What it is.
            read: Gives its K/V, in host memory, or None if they are gone by now; called once, on the writer's thread. Until
                `take_written` names the key the caller keeps them from being overwritten.

        Returns:
            False if too much waits, after `close`, and where no thread can be started; it is counted, and `take_written` does
            not name it.
        """
        num_bytes = record.num_tokens * self._layout.bytes_per_token
        with self._lock:
            is_full = self._num_queued and self._queued_bytes + num_bytes > self._max_queued_bytes
            if is_full or self._threads.is_closed:
                self.counters.dropped += 1
                return False
            self._queued_bytes += num_bytes
            self._num_queued += 1
        if self._threads.submit(lambda: self._write(record, read, num_bytes)):
            return True
        self.counters.dropped += 1
        self._leave_queue(num_bytes)
        return False

    def take_written(self) -> list[Written]:
        """What has become of donors since the last call."""
        taken = []
        while self._written:
            taken.append(self._written.popleft())
        return taken

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was offered is written or given up; False if it takes longer."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._num_queued, timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what waits, for at most `timeout_s`, and end; what is left is not stored."""
        self.flush(timeout_s)
        self._threads.close()

    def _write(self, record: DonorRecord, read: Callable[[], KVBlock | None], num_bytes: int) -> None:
        is_stored = False
        try:
            is_stored = self._put(record, read, num_bytes)
        except CapacityError as error:
            self.counters.refused += 1
            logger.debug("%s does not keep a donor of %d tokens: %s", self._store.name, record.num_tokens, error)
        except Exception as error:  # noqa: BLE001 - a donor less in the store harms no request
            self.counters.failed += 1
            if self.counters.failed == 1:
                logger.warning("%s does not keep a donor; more are only counted: %s", self._store.name, one_line(error))
        self._written.append(Written(record.key, is_stored))
        self._leave_queue(num_bytes)

    def _leave_queue(self, num_bytes: int) -> None:
        with self._idle:
            self._queued_bytes -= num_bytes
            self._num_queued -= 1
            self._idle.notify_all()

    def _put(self, record: DonorRecord, read: Callable[[], KVBlock | None], num_bytes: int) -> bool:
        if self._is_known(record.key):
            self.counters.known += 1
            return True
        if record.num_tokens > MOST_TOKENS:
            raise CapacityError(f"an object has at most {MOST_TOKENS} tokens")
        block = read()
        if block is None:
            self.counters.dropped += 1
            return False
        rows = self._layout.pack(block)
        layout = self._layout
        sums = page_checksums(rows, record.key)
        head = encode_head(record, self._space, layout.description, layout.bytes_per_token, sums)
        if self._store.put(self._space, record.key, head, rows.data.cast("B")):
            self.counters.stored += 1
            self.counters.num_bytes += num_bytes
        else:
            self.counters.known += 1
        return True

    def _is_known(self, key: str) -> bool:
        """Whether the store has it, with a head that can be read; another goes, or the donor could never be stored."""
        _, raw = next(iter(self._store.heads(self._space, [key])))
        if raw is None:
            return False
        try:
            decode_head(raw, self._space, key)
        except StoreError as error:
            logger.warning("%s: %s; it is written again", self._store.name, error)
            self._store.remove(self._space, key)
            return False
        return True
