"""Passes of a graft over its prompt, cut into pieces; those that observe keys are in `key_deviation.py`.

A pass through all layers may be watched by a `QueryLook`, and may correct tokens that stay reused by those that it computes
(`DriftPass`).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.integrations.vllm.worker.drift_pass import DriftPass
from kvgraft.integrations.vllm.worker.virtual_batch import RowRuns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from kvgraft.graft.drift_plan import DriftPlan
    from kvgraft.integrations.vllm.worker.group_kv import GroupKV
    from kvgraft.integrations.vllm.worker.query_look import QueryLook
    from kvgraft.integrations.vllm.worker.spans import DonorSpans
    from kvgraft.integrations.vllm.worker.sparse_pass import RankModel


@dataclass(frozen=True, slots=True, eq=False)
class GraftedPrompt:
    """The prompt that passes work on: int32 tokens, a home of K/V per group, and the reused K/V."""

    rank: RankModel
    token_ids: NDArray[np.int32]
    homes: Sequence[GroupKV]
    spans: DonorSpans

    def prepare(self, first_row: int, stop: int) -> None:
        """Bring in the reused K/V that rows in `[first_row, stop)` may attend to."""
        for home in self.homes:
            home.prepare(self.spans, first_row, stop)


class GraftPass(ABC):
    """Ascending rows to compute; `inject_s` counts the seconds of bringing reused K/V in."""

    def __init__(self, prompt: GraftedPrompt, rows: NDArray[np.int64]) -> None:
        self._prompt = prompt
        self._rows = rows
        self._done = 0
        self.inject_s = 0.0

    @property
    def is_done(self) -> bool:
        """Whether all rows are computed."""
        return self._done == len(self._rows)

    def deviation(self) -> NDArray[np.float32] | None:
        """Return how far computed keys are from reused ones, float32 per position, if it was observed; all ranks must ask."""
        return None

    def continued(self, rows: NDArray[np.int64]) -> GraftPass | None:
        """Return the pass that takes `rows` on from here through the layers that this one left out, if it can."""
        del rows
        return None

    def advance(self, max_rows: int) -> NDArray[np.int64]:
        """Compute the next rows and return them: at most `max_rows`, unless rows that go together are more.

        Return no rows as long as the next ones attend to K/V that have not arrived.
        """
        stop = self._cut(max_rows)
        if stop > self._done and self._reach(stop) > self._prompt.spans.ready_end:
            stop = self._done
        rows = self._rows[self._done : stop]
        if not len(rows):
            return rows
        started = time.perf_counter()
        self._prompt.prepare(int(rows[0]), self._reach(stop))
        self.inject_s += time.perf_counter() - started
        self._run(rows)
        self._done = stop
        return rows

    def _cut(self, max_rows: int) -> int:
        """Return the row number at which the next piece ends."""
        limit = min(self._row_limit(int(self._rows[self._done])), self._prompt.spans.ready_end)
        stop = min(self._done + max_rows, int(np.searchsorted(self._rows, limit)), len(self._rows))
        return self._done + RowRuns.within(self._rows[self._done : stop], self._prompt.rank.most_runs)

    def _reach(self, stop: int) -> int:
        """Return the first position after all that a piece up to row number `stop` reads or writes."""
        return int(self._rows[stop - 1]) + 1

    def _row_limit(self, first_row: int) -> int:
        """Return the first position that cannot be computed in one piece with `first_row`."""
        return min(home.row_limit(first_row) for home in self._prompt.homes)

    @abstractmethod
    def _run(self, rows: NDArray[np.int64]) -> None: ...


class AllLayersPass(GraftPass):
    """The whole model."""

    def __init__(
        self, prompt: GraftedPrompt, rows: NDArray[np.int64], drift: DriftPlan, look: QueryLook | None = None
    ) -> None:
        """Compute `rows`, correct the runs of `drift`, and show the rows' attention to `look` if there is one."""
        super().__init__(prompt, rows)
        self._look = look
        self._drift = drift
        self._last: Tensor | None = None

    def logits(self) -> Tensor | None:
        """Return the logits (vocab_size,) of the last row that was computed; all ranks must ask, and some get None."""
        return None if self._last is None else self._prompt.rank.logits(self._last)

    def _cut(self, max_rows: int) -> int:
        """Cut no run: all its rows are in one piece, and all its tokens lie in every home."""
        stop = super()._cut(max_rows)
        if stop == self._done:
            return stop
        stop = self._drift.cut(self._done, stop)
        runs = self._drift.between(self._done, stop)
        if runs is None or self._reach(stop) <= self._row_limit(int(self._rows[self._done])):
            return stop
        *_, last = runs.runs  # it begins after other rows, or it would fit: it is no longer than `Scope.longest_run`
        return self._drift.cut(self._done, int(np.searchsorted(self._rows, last.sample[0])))

    def _reach(self, stop: int) -> int:
        """Include corrected tokens after the last row: later rows attend to them, so they must be in place."""
        reach = super()._reach(stop)
        runs = self._drift.between(self._done, stop)
        return reach if runs is None else max(reach, *(int(run.rest[-1]) + 1 for run in runs.runs))

    def _run(self, rows: NDArray[np.int64]) -> None:
        prompt = self._prompt
        drift = self._drift.between(self._done, self._done + len(rows))
        with ExitStack() as stack:
            if self._look is not None:
                stack.enter_context(self._look.watching(rows))
            if drift is not None:
                stack.enter_context(DriftPass(prompt.homes, prompt.rank.rope, rows, drift).correcting())
            self._last = prompt.rank.run(prompt.token_ids[rows], RowRuns.of(rows), prompt.homes)
