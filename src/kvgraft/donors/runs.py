"""Runs of equal tokens between a prompt and donors, many at once: one array per attribute."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvgraft.donors.fingerprint import Positions


class Runs(NamedTuple):
    """Intervals of a prompt that equal an interval of a donor. All arrays int64 of one length.

    Attributes:
        starts: First prompt position.
        ends: First prompt position behind.
        diagonals: Arena index minus prompt position.
        rows: Donor row.
    """

    starts: Positions
    ends: Positions
    diagonals: Positions
    rows: Positions

    @classmethod
    def empty(cls) -> Runs:
        """What a prompt has that matches no donor."""
        return cls(*(np.empty(0, np.int64) for _ in cls._fields))

    @property
    def num_runs(self) -> int:
        """How many runs were found, each within one donor."""
        return len(self.starts)

    @property
    def num_tokens(self) -> int:
        """Length of all runs together."""
        return int((self.ends - self.starts).sum())

    def take(self, index: Positions | NDArray[np.bool_]) -> Runs:
        """Return the runs chosen by indices or a mask."""
        return Runs(*(attribute[index] for attribute in self))

    def joined(self, other: Runs) -> Runs:
        """Return these runs and `other`'s."""
        return Runs(*(np.concatenate(pair) for pair in zip(self, other, strict=True)))

    def clipped(self, start: int, min_run: int) -> Runs:
        """Return the parts at or behind prompt position `start` that are at least `min_run` long."""
        runs = self._replace(starts=np.maximum(self.starts, start))
        return runs.take(runs.ends - runs.starts >= min_run)

    def between(self, start: int, end: int, min_run: int) -> Runs:
        """Return the parts in prompt positions `[start, end)` that are at least `min_run` long."""
        return self._replace(ends=np.minimum(self.ends, end)).clipped(start, min_run)
