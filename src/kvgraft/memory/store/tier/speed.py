"""How long reads take, from reads that were made lately."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

_DECAY = 0.9
_FIRST_LATENCY_S = 1e-3
_FIRST_BYTES_PER_S = 1e9
"""Before anything was read: hopeful, so that something is read."""
_BELIEVED_S, _HALF_LIFE_S = 5.0, 3.0
"""What was read last is believed for so long, and half as much of it every so many seconds after that: an expectation that
nothing is read by is corrected by nothing else."""


class _Moments(NamedTuple):
    """Weights and moments of (bytes, seconds)."""

    n: float
    x: float
    y: float
    xx: float
    xy: float

    @classmethod
    def of(cls, num_bytes: int, seconds: float) -> _Moments:
        return cls(1, num_bytes, seconds, num_bytes * num_bytes, num_bytes * seconds)

    def mixed(self, weight: float, other: _Moments, weight_of_other: float) -> _Moments:
        return _Moments(*(weight * mine + weight_of_other * its for mine, its in zip(self, other, strict=True)))

    def fitted(self) -> tuple[float, float]:
        """Least squares with both parts at least 0; reads of one size say nothing about the share of each."""
        spread = self.n * self.xx - self.x * self.x
        per_byte = (self.n * self.xy - self.x * self.y) / spread if spread > 0 else 0.0
        latency = (self.y - per_byte * self.x) / self.n
        if per_byte < 0 or spread <= 0:
            return self.y / self.n, 0.0
        if latency < 0:
            return 0.0, self.xy / self.xx
        return latency, per_byte


def _hopeful() -> _Moments:
    """A made-up small and a made-up large read."""
    small, large = (_Moments.of(n, _FIRST_LATENCY_S + n / _FIRST_BYTES_PER_S) for n in (0, 1 << 24))
    return small.mixed(1, large, 1)


_HOPEFUL = _hopeful()


class ReadSpeed:
    """A fixed time per read and one per byte, fitted to decaying sums of the reads so far. Thread-safe.

    A store that has not been read for a while is expected to be quick again, so that a request tries it: one that stalled is
    not left alone for good.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin hopeful; `clock` gives seconds."""
        self._clock = clock
        self._lock = threading.Lock()
        self._moments = _HOPEFUL
        self._observed_at = clock()

    def observe(self, num_bytes: int, seconds: float) -> None:
        """Take over how long a read took, failed ones included: they are slow, too."""
        with self._lock:
            self._moments = self._faded().mixed(_DECAY, _Moments.of(num_bytes, seconds), 1)
            self._observed_at = self._clock()

    def seconds(self, num_bytes: int, num_reads: int = 1) -> float:
        """Expected seconds of so many reads of so many bytes in all, one after another."""
        with self._lock:
            latency, per_byte = self._faded().fitted()
        return num_reads * latency + num_bytes * per_byte

    def _faded(self) -> _Moments:
        """What is known by now: old reads count less, and hope more."""
        left = 0.5 ** (max(0.0, self._clock() - self._observed_at - _BELIEVED_S) / _HALF_LIFE_S)
        return self._moments.mixed(left, _HOPEFUL, 1 - left)
