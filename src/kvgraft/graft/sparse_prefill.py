"""Sparse prefill: compute the gaps of a grafted prompt and the reused tokens a policy chooses, and nothing else.

`sparse_prefill` decides, it runs nothing: a generator that yields `SequenceRows` for somebody to compute and receives the
`SequenceOutput`. So a scheduler can put the rows of several requests into one forward pass, in pieces of bounded size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.graft.model import SequenceOutput, SequenceRows
from kvgraft.graft.select.base import Observation, Recompute, SelectionContext, SelectionPolicy

if TYPE_CHECKING:
    from collections.abc import Generator

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


def sparse_prefill(
    token_ids: TokenArray,
    plan: GraftPlan,
    kv_indices: NDArray[np.int64],
    policy: SelectionPolicy,
    *,
    max_rows: int,
) -> Generator[SequenceRows, SequenceOutput, PrefillOutcome]:
    """Yield the rows to compute for `plan`, at most `max_rows` at a time; return logits and counts.

    The reused K/V must lie in their slots before the first row is computed. The caller runs the rows in the order given.
    """
    computed = np.zeros(plan.num_tokens, dtype=bool)
    logits: Tensor | None = None
    steps = policy.steps(selection_context(plan))
    step: Recompute | None = next(steps)
    while step is not None:
        rows = _rows_of(step, plan, computed)
        mass: NDArray[np.float32] | None = None
        if len(rows):
            mass, logits = yield from _run(token_ids, rows, kv_indices, step.observe_query, max_rows)
            computed[rows] = True
        assert logits is not None
        try:
            step = steps.send(Observation(logits, mass))
        except StopIteration:
            step = None
    assert logits is not None
    return PrefillOutcome(logits, np.flatnonzero(computed))


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


def _run(
    token_ids: TokenArray, rows: NDArray[np.int64], kv_indices: NDArray[np.int64], observe: bool, max_rows: int
) -> Generator[SequenceRows, SequenceOutput, tuple[NDArray[np.float32] | None, Tensor]]:
    mass = np.zeros(int(rows[-1]) + 1, np.float32) if observe else None
    for start in range(0, len(rows), max_rows):
        stop = min(start + max_rows, len(rows))
        observed = max(0, stop - max(start, len(rows) - QUERY_ROWS)) if observe else 0
        part = rows[start:stop]
        last = stop == len(rows)
        output = yield SequenceRows(token_ids[part], part, kv_indices, num_logits=int(last), observed_rows=observed)
        if mass is not None and output.attention_mass is not None:
            seen = output.attention_mass.cpu().numpy()
            mass[: len(seen)] += seen
    return mass, output.logits[-1]
