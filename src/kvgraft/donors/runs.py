"""Runs of equal tokens between a prompt and donors, many at once: one array per attribute."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvgraft.donors.fingerprint import Positions
    from kvgraft.types import Match


class Runs(NamedTuple):
    """Intervals of a prompt that equal an interval of a donor. All arrays int64 of one length."""

    starts: Positions
    """First prompt position."""
    ends: Positions
    """First prompt position after it."""
    diagonals: Positions
    """Arena index minus prompt position."""
    rows: Positions
    """Donor row."""

    @classmethod
    def empty(cls) -> Runs:
        """Return no runs, as of a prompt that matches no donor."""
        return cls(*(np.empty(0, np.int64) for _ in cls._fields))

    @property
    def num_runs(self) -> int:
        """Number of runs, each within one donor."""
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
        """Return the parts from prompt position `start` on that are at least `min_run` long."""
        runs = self._replace(starts=np.maximum(self.starts, start))
        return runs.take(runs.ends - runs.starts >= min_run)

    def outside(self, taken: Sequence[Match], min_run: int) -> Runs:
        """Return the parts outside of `taken`, which are disjoint and ascend, that are at least `min_run` long."""
        if not taken:
            return self
        lows, highs = [0, *(match.target_end for match in taken)], [match.target_start for match in taken]
        parts = Runs.empty()
        for low, high in zip(lows, [*highs, int(self.ends.max(initial=0))], strict=True):
            parts = parts.joined(self.between(low, high, min_run))
        return parts

    def between(self, start: int, end: int, min_run: int) -> Runs:
        """Return the parts in prompt positions `[start, end)` that are at least `min_run` long."""
        return self._replace(ends=np.minimum(self.ends, end)).clipped(start, min_run)
