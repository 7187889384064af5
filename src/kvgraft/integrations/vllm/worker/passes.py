"""Passes of a graft over its prompt, cut into pieces: all layers, or the first ones to observe keys and then the rest.

A pass through all layers may be watched by a `QueryLook`, and one over the rows behind the graft is made for it alone. It may
correct what stays reused by what it computes (`DriftPass`).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvgraft.integrations.vllm.worker.drift_pass import DriftPass
from kvgraft.integrations.vllm.worker.ranks import summed_over_ranks
from kvgraft.integrations.vllm.worker.virtual_batch import Runs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from kvgraft.graft.drift_plan import DriftPlan
    from kvgraft.integrations.vllm.worker.group_kv import GroupKV
    from kvgraft.integrations.vllm.worker.query_look import QueryLook
    from kvgraft.integrations.vllm.worker.spans import DonorSpans
    from kvgraft.integrations.vllm.worker.sparse_pass import DecoderStack, RankModel
    from kvgraft.integrations.vllm.worker.virtual_batch import BlockTable

CHECK_LAYER = 1
"""The first layer whose keys depend on what stands in front of a token."""


@dataclass(frozen=True, slots=True, eq=False)
class GraftedPrompt:
    """What passes work on.

    Attributes:
        rank: The model.
        token_ids: int32, the prompt.
        homes: Where the K/V lie, one per group.
        spans: The reused K/V.
    """

    rank: RankModel
    token_ids: NDArray[np.int32]
    homes: Sequence[GroupKV]
    spans: DonorSpans

    def prepare(self, first_row: int, stop: int) -> None:
        """Bring in what rows in `[first_row, stop)` may attend to."""
        for home in self.homes:
            home.prepare(self.spans, first_row, stop)

    @property
    def longest_run(self) -> int | None:
        """Positions of a run that can be corrected in one piece; None for no limit."""
        return min((home.longest_piece for home in self.homes if home.longest_piece is not None), default=None)

    def tables_and_caches(self) -> tuple[list[BlockTable], list[Sequence[Tensor]]]:
        """Arguments of `RankModel.batch`."""
        return [home.table for home in self.homes], [home.caches for home in self.homes]


class GraftPass(ABC):
    """Rows to compute, front to back.

    Attributes:
        inject_s: Seconds spent on bringing reused K/V in.
    """

    def __init__(self, prompt: GraftedPrompt, rows: NDArray[np.int64]) -> None:
        self._prompt = prompt
        self._rows = rows
        self._done = 0
        self.inject_s = 0.0

    @property
    def is_done(self) -> bool:
        """Whether all rows are computed."""
        return self._done == len(self._rows)

    @property
    def corrected(self) -> Sequence[NDArray[np.int64]]:
        """Positions that the whole pass corrects, run by run."""
        return ()

    def advance(self, max_rows: int) -> NDArray[np.int64]:
        """Compute the next rows and return them: at most `max_rows`, unless what is computed in one piece has more.

        None as long as they attend to K/V that are on their way.
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
        """Where the next piece ends."""
        limit = min(self._row_limit(int(self._rows[self._done])), self._prompt.spans.ready_end)
        within = int(np.searchsorted(self._rows, limit))
        return min(self._done + max_rows, within, len(self._rows))

    def _reach(self, stop: int) -> int:
        """First position behind all that a piece up to row number `stop` reads or writes."""
        return int(self._rows[stop - 1]) + 1

    def _row_limit(self, first_row: int) -> int:
        """First position that cannot be computed in one piece with `first_row`."""
        return min(home.row_limit(first_row) for home in self._prompt.homes)

    @abstractmethod
    def _run(self, rows: NDArray[np.int64]) -> None: ...


class AllLayersPass(GraftPass):
    """The whole model."""

    def __init__(
        self,
        prompt: GraftedPrompt,
        rows: NDArray[np.int64],
        look: QueryLook | None = None,
        drift: DriftPlan | None = None,
    ) -> None:
        """Compute `rows`, under the eyes of `look` and with the runs of `drift` corrected, where these are given."""
        super().__init__(prompt, rows)
        self._look = look
        self._drift = drift

    @property
    def corrected(self) -> Sequence[NDArray[np.int64]]:
        """See `GraftPass`."""
        return [run.rest for run in (() if self._drift is None else self._drift.runs)]

    def _cut(self, max_rows: int) -> int:
        """A run is corrected in one piece: all its rows are in it, and all its tokens lie in every home."""
        stop = super()._cut(max_rows)
        if self._drift is None or stop == self._done:
            return stop
        stop = self._drift.cut(self._done, stop)
        runs = self._drift.between(self._done, stop)
        if runs is None or self._reach(stop) <= self._row_limit(int(self._rows[self._done])):
            return stop
        *_, last = runs.runs  # it begins behind other rows, or it would fit: it is no longer than `longest_run`
        return self._drift.cut(self._done, int(np.searchsorted(self._rows, last.sample[0])))

    def _reach(self, stop: int) -> int:
        """What is corrected behind the last row is attended to by later rows: it must be there already."""
        reach = super()._reach(stop)
        runs = None if self._drift is None else self._drift.between(self._done, stop)
        return reach if runs is None else max(reach, *(int(run.rest[-1]) + 1 for run in runs.runs))

    def _run(self, rows: NDArray[np.int64]) -> None:
        prompt = self._prompt
        drift = None if self._drift is None else self._drift.between(self._done, self._done + len(rows))
        with ExitStack() as stack:
            if self._look is not None:
                stack.enter_context(self._look.watching(rows))
            if drift is not None:
                stack.enter_context(DriftPass(prompt.homes, prompt.rank.rope, rows, drift).correcting())
            prompt.rank.run(prompt.token_ids[rows], Runs.of(rows), *prompt.tables_and_caches())


class QueryPass(GraftPass):
    """The rows behind the graft through the whole model, to see what they attend to; stores nothing."""

    def __init__(self, prompt: GraftedPrompt, rows: NDArray[np.int64], look: QueryLook) -> None:
        super().__init__(prompt, rows)
        self._look = look

    def _row_limit(self, first_row: int) -> int:
        """No limit: the rows lie in no home."""
        del first_row
        return np.iinfo(np.int64).max

    def _run(self, rows: NDArray[np.int64]) -> None:
        self._look.run_behind(self._prompt.token_ids[rows], rows)


class KeyDeviationPass(GraftPass):
    """Every position through the layers up to `CHECK_LAYER`; remembers hidden states, 2 * width numbers per position.

    Source: CacheBlend, https://arxiv.org/abs/2405.16444.
    """

    def __init__(self, prompt: GraftedPrompt, rows: NDArray[np.int64], stack: DecoderStack) -> None:
        super().__init__(prompt, rows)
        self._stack = stack
        self._first = int(rows[0])
        self._states: list[tuple[Tensor, Tensor]] = []
        self._deviation = torch.zeros(int(rows[-1]) + 1)

    def deviation(self) -> NDArray[np.float32]:
        """float32 per position, summed over all ranks' heads and the channels of the check layer; all ranks must ask."""
        found: NDArray[np.float32] = summed_over_ranks(self._deviation).numpy()
        return found

    def later_layers(self, rows: NDArray[np.int64]) -> LaterLayersPass:
        """The pass that takes `rows` on from here."""
        hidden, residual = (torch.cat([state[part] for state in self._states]) for part in (0, 1))
        chosen = torch.from_numpy(rows - self._first).to(hidden.device)
        return LaterLayersPass(self._prompt, rows, self._stack, (hidden[chosen], residual[chosen]))

    def _run(self, rows: NDArray[np.int64]) -> None:
        prompt = self._prompt
        with prompt.rank.batch(Runs.of(rows), *prompt.tables_and_caches()) as positions:
            hidden = self._stack.embed(prompt.token_ids[rows], prompt.rank.device)
            hidden, residual = self._stack.run(positions, hidden, None, 0, CHECK_LAYER + 1)
        assert residual is not None
        self._states.append((hidden, residual))
        reused = prompt.spans.between(int(rows[0]), int(rows[-1]) + 1)
        if reused is None:
            return
        before = reused.read(CHECK_LAYER)[0]
        after = prompt.homes[0].place(reused.positions).read(CHECK_LAYER)[0]
        change = (after.float() - before.float()).square().sum((1, 2)).cpu()
        self._deviation[torch.from_numpy(reused.positions)] = change


class LaterLayersPass(GraftPass):
    """Chosen positions through the layers behind `CHECK_LAYER`, from the hidden states of a `KeyDeviationPass`."""

    def __init__(
        self, prompt: GraftedPrompt, rows: NDArray[np.int64], stack: DecoderStack, states: tuple[Tensor, Tensor]
    ) -> None:
        """Take hidden states and residuals of `rows`, each `(num_rows, width)`."""
        super().__init__(prompt, rows)
        self._stack = stack
        self._hidden, self._residual = states

    def _run(self, rows: NDArray[np.int64]) -> None:
        prompt, stack = self._prompt, self._stack
        part = slice(self._done, self._done + len(rows))
        with prompt.rank.batch(Runs.of(rows), *prompt.tables_and_caches()) as positions:
            stack.run(positions, self._hidden[part], self._residual[part], CHECK_LAYER + 1, len(stack.layers))
