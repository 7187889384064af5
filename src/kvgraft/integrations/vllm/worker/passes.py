"""Passes of a graft over its prompt, cut into pieces: all layers, or the first ones to observe keys and then the rest.

A pass through all layers may be watched by a `QueryLook`, and one over the rows behind the graft is made for it alone.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvgraft.integrations.vllm.worker.ranks import summed_over_ranks
from kvgraft.integrations.vllm.worker.virtual_batch import Runs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

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

    def prepare(self, rows: NDArray[np.int64]) -> None:
        """Bring in what `rows` may attend to."""
        for home in self.homes:
            home.prepare(self.spans, int(rows[0]), int(rows[-1]) + 1)

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

    def advance(self, max_rows: int) -> NDArray[np.int64]:
        """Compute the next rows, at most `max_rows`, and return them."""
        rows = self._rows[self._done : self._done + max_rows]
        rows = rows[: np.searchsorted(rows, self._row_limit(int(rows[0])))]
        started = time.perf_counter()
        self._prompt.prepare(rows)
        self.inject_s += time.perf_counter() - started
        self._run(rows)
        self._done += len(rows)
        return rows

    def _row_limit(self, first_row: int) -> int:
        """First position that cannot be computed in one piece with `first_row`."""
        return min(home.row_limit(first_row) for home in self._prompt.homes)

    @abstractmethod
    def _run(self, rows: NDArray[np.int64]) -> None: ...


class AllLayersPass(GraftPass):
    """The whole model."""

    def __init__(self, prompt: GraftedPrompt, rows: NDArray[np.int64], look: QueryLook | None = None) -> None:
        """Compute `rows`, under the eyes of `look` if it is given."""
        super().__init__(prompt, rows)
        self._look = look

    def _run(self, rows: NDArray[np.int64]) -> None:
        prompt = self._prompt
        with nullcontext() if self._look is None else self._look.watching(rows):
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
