"""Sparse prefill: compute the gaps of a grafted prompt and the reused tokens a policy chooses, and nothing else.

`SparsePrefill` decides, it runs nothing: it names `SequenceRows` for somebody to compute and receives the `SequenceOutput`.
So a scheduler can put the rows of several requests into one forward pass, in pieces as small as it likes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.graft.model import SequenceOutput, SequenceRows
from kvgraft.graft.select.base import Observation, Recompute, SelectionContext, SelectionPolicy

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from kvgraft.types import GraftPlan, Match, TokenArray

QUERY_ROWS = 64
"""At most this many of the last live rows count as the query; longer questions say little more and cost attention."""


@dataclass(frozen=True, slots=True, eq=False)
class PrefillOutcome:
    """The result of a sparse prefill.

    Attributes:
        logits: float32 (vocab_size,) behind the last prompt token.
        computed: int64, ascending positions whose K/V were computed for this request.
    """

    logits: Tensor
    computed: NDArray[np.int64]

    def recomputed(self, plan: GraftPlan) -> int:
        """How many reused tokens were computed again."""
        return len(self.computed) - len(plan.compute)


def selection_context(plan: GraftPlan) -> SelectionContext:
    """Lay out the reused tokens of `plan`; spans that continue one another in donor and prompt are one run."""
    computed = np.zeros(plan.num_tokens, dtype=bool)
    computed[plan.compute] = True
    positions: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
    distances: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
    run_start = 0
    previous: Match | None = None
    for span in plan.spans:
        if previous is None or not _continues(previous, span):
            run_start = span.target_start
        positions.append(np.arange(span.target_start, span.target_end))
        distances.append(positions[-1] - run_start)
        previous = span
    reused, distance = np.concatenate(positions), np.concatenate(distances)
    kept = ~computed[reused]
    return SelectionContext(plan.num_tokens, reused[kept], distance[kept], plan.compute)


def _continues(previous: Match, span: Match) -> bool:
    return (
        previous.donor_id == span.donor_id
        and previous.target_end == span.target_start
        and previous.position_delta == span.position_delta
    )


class SparsePrefill:
    """The prefill of one prompt: rows to compute, in passes that its policy asks for and pieces that its caller cuts.

    Take `next_rows`, run them, hand the output to `receive`; in that order, until it returns an outcome. Reused K/V must lie
    in their slots before the first row is computed.
    """

    def __init__(
        self,
        token_ids: TokenArray,
        plan: GraftPlan,
        kv_indices: NDArray[np.int64],
        policy: SelectionPolicy,
        swa_indices: NDArray[np.int64] | None = None,
    ) -> None:
        self._token_ids = token_ids
        self._plan = plan
        self._kv_indices = kv_indices
        self._swa_indices = swa_indices
        self._computed = np.zeros(plan.num_tokens, dtype=bool)
        self._steps = policy.steps(selection_context(plan))
        self._done = 0
        self._pending = 0
        self._begin_pass(next(self._steps))

    @property
    def remaining(self) -> NDArray[np.int64]:
        """Positions that the present pass still has to compute, at least one; later passes may follow."""
        return self._rows[self._done :]

    def next_rows(self, limit: int) -> SequenceRows:
        """The next rows of the present pass, at most `limit`; the same until `receive` is called."""
        start, stop = self._done, min(self._done + limit, len(self._rows))
        self._pending = stop
        observed = max(0, stop - max(start, len(self._rows) - QUERY_ROWS)) if self._mass is not None else 0
        part = self._rows[start:stop]
        is_last = stop == len(self._rows)
        return SequenceRows(
            self._token_ids[part],
            part,
            self._kv_indices,
            num_logits=int(is_last),
            observed_rows=observed,
            swa_indices=self._swa_indices,
            seq_len=self._plan.num_tokens,
        )

    def receive(self, output: SequenceOutput) -> PrefillOutcome | None:
        """Take the output of `next_rows`; returns the outcome when the prompt is computed."""
        if self._mass is not None and output.attention_mass is not None:
            seen = output.attention_mass.cpu().numpy()
            self._mass[: len(seen)] += seen
        self._done = self._pending
        if self._done < len(self._rows):
            return None
        logits = output.logits[-1]
        self._computed[self._rows] = True
        mass = self._mass
        while True:
            try:
                step = self._steps.send(Observation(logits, mass))
            except StopIteration:
                return PrefillOutcome(logits, np.flatnonzero(self._computed))
            self._begin_pass(step)
            if len(self._rows):
                return None
            mass = None  # a step that chose nothing new is answered with what is known

    def _begin_pass(self, step: Recompute) -> None:
        self._rows = _rows_of(step, self._plan, self._computed)
        self._mass = np.zeros(self._plan.num_tokens, np.float32) if step.observe_query else None
        self._done = self._pending = 0


def _rows_of(step: Recompute, plan: GraftPlan, computed: NDArray[np.bool_]) -> NDArray[np.int64]:
    """New positions, on the first step with all live rows, and the query rows behind them once more.

    Live rows in front of the query are not run again: it would cost a second prefill of every new passage and changes the
    answer less than we can measure (docs/adr/0001).
    """
    new = np.union1d(step.positions[~computed[step.positions]], plan.compute[~computed[plan.compute]])
    if not len(new):
        return new
    query = plan.compute[-QUERY_ROWS:]
    return np.union1d(new, query[query > new[0]])
