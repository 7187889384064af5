"""Runs that a pass corrects, the rows that it samples for them, and places where it may be cut. `graft/drift.py` corrects."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvgraft.errors import PolicyError, one_line
from kvgraft.graft.drift_layout import DriftRun
from kvgraft.graft.model import DriftRuns

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from kvgraft.graft.drift import DriftCorrection
    from kvgraft.graft.drift_estimate import DriftEstimator
    from kvgraft.graft.select.base import SelectionContext

MAX_RUN_ROWS = 32
"""Rows that are computed together for one estimate; a run of more counts as several.

So steps stay short, and estimates, which cost (sampled) x (remaining) tokens, cheap; 128 were less faithful (docs/adr/0006).
"""


class _PlannedRun(NamedTuple):
    """Rows `[first, stop)` of a pass that lie in one run."""

    first: int
    stop: int
    run: DriftRun


@dataclass(frozen=True, slots=True, eq=False)
class DriftPlan:
    """The runs that one pass of `num_rows` rows corrects; by default none.

    All rows of a run are computed in one piece: rows before a sampled one attend to tokens that its drift corrects. By
    causality nothing else matters for where a pass is cut, because a run sees only the runs before it.
    """

    num_rows: int
    _correction: DriftCorrection | None = None
    _planned: tuple[_PlannedRun, ...] = ()
    _pools_runs: bool = False

    @classmethod
    def of(
        cls,
        context: SelectionContext,
        rows: NDArray[np.int64],
        sample: NDArray[np.int64],
        computed: NDArray[np.bool_],
        correction: DriftCorrection | None,
        *,
        max_length: int | None = None,
    ) -> DriftPlan:
        """Plan a pass.

        Args:
            context: The prompt's runs.
            rows: int64, ascending positions that the pass computes.
            sample: int64, ascending positions of which those that the pass computes first may estimate drift.
            computed: bool (num_tokens,), positions that earlier passes computed: they neither drift nor are corrected.
            correction: None to correct nothing.
            max_length: Tokens that can be corrected in one piece; a run of more counts as several. None for no limit.

        Raises:
            PolicyError: The estimator, which may be foreign code, does not say what it needs.
        """
        if correction is None or not len(sample):
            return cls(len(rows))
        least_sample, pools_runs = _needs(correction.estimator)
        planned = _planned(context, rows, sample, computed, least_sample=least_sample, max_length=max_length)
        return cls(len(rows), correction, tuple(planned), pools_runs)

    @property
    def runs(self) -> tuple[DriftRun, ...]:
        """All corrected runs of the pass, ascending."""
        return tuple(planned.run for planned in self._planned)

    def cut(self, start: int, stop: int) -> int:
        """Return the last row at or before `stop` before which the pass may be cut, or the first one after `start`."""
        stop = min(stop, self.num_rows)
        for first, last in self._blocks():
            if first < stop < last:
                return first if first > start else last
        return stop

    def between(self, start: int, stop: int) -> DriftRuns | None:
        """Return the runs that rows `[start, stop)` correct; both are places where the pass may be cut."""
        runs = tuple(planned.run for planned in self._planned if start <= planned.first and planned.stop <= stop)
        return DriftRuns(self._correction, runs) if self._correction is not None and runs else None

    def _blocks(self) -> list[tuple[int, int]]:
        """Return the rows `[first, stop)` that are computed in one piece."""
        if self._pools_runs and self._planned:
            return [(self._planned[0].first, self._planned[-1].stop)]
        return [(planned.first, planned.stop) for planned in self._planned]


def _needs(estimator: DriftEstimator) -> tuple[int, bool]:
    """Return `least_sample` and `pools_runs`; what is no number or no truth value counts as a failure."""
    try:
        return operator.index(estimator.least_sample), bool(estimator.pools_runs)
    except Exception as error:
        raise PolicyError(f"drift estimator {type(estimator).__name__}: {one_line(error)}") from error


def _planned(
    context: SelectionContext,
    rows: NDArray[np.int64],
    sample: NDArray[np.int64],
    computed: NDArray[np.bool_],
    *,
    least_sample: int,
    max_length: int | None,
) -> Iterator[_PlannedRun]:
    """Yield the runs, ascending, of which enough tokens are sampled and some stay. O(num_reused)."""
    stays = ~computed
    stays[rows] = False
    is_sample = np.zeros(len(computed), np.bool_)
    is_sample[sample] = True
    is_sample &= ~computed
    repeats = context.repeats
    for run in np.split(context.reused, context.run_starts[1:]):
        if not len(run):
            continue
        for begin, end, low, high in _parts(rows, int(run[0]), int(run[-1]) + 1, max_length):
            members = np.arange(low, high)
            said = repeats[slice(*np.searchsorted(repeats, [low, high]))]
            part = DriftRun(rows[begin:end][is_sample[rows[begin:end]]], members[stays[low:high]], said)
            if len(part.sample) >= least_sample and len(part.rest):
                yield _PlannedRun(begin, end, part)


def _parts(rows: NDArray[np.int64], low: int, high: int, max_length: int | None) -> Iterator[tuple[int, int, int, int]]:
    """Cut a run at positions `[low, high)` so that no part is longer, or has more rows than `MAX_RUN_ROWS`.

    Yields rows `[begin, end)` and positions `[low, high)` of each part.
    """
    lengths = 1 if max_length is None else math.ceil((high - low) / max_length)
    for start, stop in pairwise(np.linspace(low, high, lengths + 1).astype(int).tolist()):
        first, last = np.searchsorted(rows, [start, stop]).tolist()
        count = max(1, math.ceil((last - first) / MAX_RUN_ROWS))
        edges = np.linspace(first, last, count + 1).astype(int).tolist()
        bounds = [start, *(int(rows[edge]) for edge in edges[1:-1]), stop]
        for part in range(count):
            yield edges[part], edges[part + 1], bounds[part], bounds[part + 1]
