"""Memory for what is read from stores, used again once it has no reader: new pages cost as much as reading into them."""

from __future__ import annotations

import threading
import weakref

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

_GRAIN = 1 << 18
"""Sizes are multiples of it, so that spans of nearly one length share a buffer."""
_LEAST = 1 << 16
"""Shorter rows come from the allocator, which keeps such memory itself."""


class ReadBuffers:
    """Hands out rows and takes their memory back when the last view of them is gone. Thread-safe."""

    def __init__(self, max_idle_bytes: int) -> None:
        """Prepare.

        Args:
            max_idle_bytes: Memory that may be kept unused.
        """
        self._max_idle_bytes = max_idle_bytes
        self._lock = threading.Lock()
        self._idle: list[Bytes] = []

    @property
    def idle_bytes(self) -> int:
        """Bytes that are kept unused."""
        with self._lock:
            return sum(buffer.nbytes for buffer in self._idle)

    def rows(self, count: int, row_bytes: int) -> Bytes:
        """Uninitialised rows `(count, row_bytes)` of their own, for as long as they or views of them are held."""
        size = count * row_bytes
        if size < _LEAST:
            return np.empty((count, row_bytes), np.uint8)
        buffer = self._found(size)
        if buffer is None:
            buffer = np.empty(-(-size // _GRAIN) * _GRAIN, np.uint8)
        # Through a memoryview: views of an array that is a view of another array would keep that one, and not this.
        given = np.frombuffer(buffer.data[:size], np.uint8)
        weakref.finalize(given, _give_back, weakref.ref(self), buffer).atexit = False
        return given.reshape(count, row_bytes)

    def _found(self, size: int) -> Bytes | None:
        """Take the smallest idle buffer that is large enough and not twice too large."""
        with self._lock:
            fitting = [buffer for buffer in self._idle if size <= buffer.nbytes <= 2 * max(size, _GRAIN)]
            if not fitting:
                return None
            best = min(fitting, key=lambda buffer: buffer.nbytes)
            self._idle = [buffer for buffer in self._idle if buffer is not best]
            return best

    def take_back(self, buffer: Bytes) -> None:
        """Keep a buffer without a reader in place of those that came back before it, as much as may be kept.

        Views may go at any moment, in any thread, in the middle of the methods above: nothing waits for the lock, and
        what comes back while it is held is freed.
        """
        if buffer.nbytes > self._max_idle_bytes or not self._lock.acquire(blocking=False):
            return
        try:
            self._idle.append(buffer)
            while sum(buffer.nbytes for buffer in self._idle) > self._max_idle_bytes:
                self._idle.pop(0)
        finally:
            self._lock.release()


def _give_back(pool: weakref.ref[ReadBuffers], buffer: Bytes) -> None:
    """Rows have gone, perhaps later than those who handed them out."""
    buffers = pool()
    if buffers is not None:
        buffers.take_back(buffer)
