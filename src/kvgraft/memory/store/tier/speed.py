"""How long reads take, from reads that were made."""

from __future__ import annotations

import threading

_DECAY = 0.9
_FIRST_LATENCY_S = 1e-3
_FIRST_BYTES_PER_S = 1e9
"""Before anything was read: hopeful, so that something is read."""


class ReadSpeed:
    """A fixed time per read and one per byte, fitted to decaying sums of the reads so far. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Weights and moments of (bytes, seconds), with one made-up small and one made-up large read to begin with.
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        for num_bytes in (0, 1 << 24):
            self._add(num_bytes, _FIRST_LATENCY_S + num_bytes / _FIRST_BYTES_PER_S)

    def observe(self, num_bytes: int, seconds: float) -> None:
        """Take over how long a read took, failed ones included: they are slow, too."""
        with self._lock:
            self._n, self._x, self._y, self._xx, self._xy = (
                _DECAY * moment for moment in (self._n, self._x, self._y, self._xx, self._xy)
            )
            self._add(num_bytes, seconds)

    def seconds(self, num_bytes: int, num_reads: int = 1) -> float:
        """Expected seconds of so many reads of so many bytes in all, one after another."""
        with self._lock:
            latency, per_byte = self._fit()
        return num_reads * latency + num_bytes * per_byte

    def _add(self, num_bytes: int, seconds: float) -> None:
        self._n += 1
        self._x += num_bytes
        self._y += seconds
        self._xx += num_bytes * num_bytes
        self._xy += num_bytes * seconds

    def _fit(self) -> tuple[float, float]:
        """Least squares with both parts at least 0; reads of one size say nothing about the share of each."""
        spread = self._n * self._xx - self._x * self._x
        per_byte = (self._n * self._xy - self._x * self._y) / spread if spread > 0 else 0.0
        latency = (self._y - per_byte * self._x) / self._n
        if per_byte < 0 or spread <= 0:
            return self._y / self._n, 0.0
        if latency < 0:
            return 0.0, self._xy / self._xx
        return latency, per_byte
