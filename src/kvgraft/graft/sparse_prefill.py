"""Sparse prefill: compute the gaps of a grafted prompt and the reused tokens a policy chooses, and nothing else.

`SparsePrefill` decides, it runs nothing: it names `SequenceRows` for somebody to compute and receives the `SequenceOutput`.
So a scheduler can put the rows of several requests into one forward pass, in pieces as small as it likes.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.errors import PolicyError
from kvgraft.graft.drift_plan import DriftPlan
from kvgraft.graft.model import SequenceOutput, SequenceRows
from kvgraft.graft.select.base import Observation, Recompute, SelectionContext, SelectionPolicy
from kvgraft.graft.select.guard import PolicySteps

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from torch import Tensor

    from kvgraft.graft.drift import DriftCorrection
    from kvgraft.types import GraftPlan, Match, TokenArray

QUERY_ROWS = 64
"""At most this many of the last live rows count as the query; longer questions say little more and cost attention."""


@dataclass(frozen=True, slots=True, eq=False)
class PrefillOutcome:
    """The result of a sparse prefill.

    Attributes:
        logits: float32 (vocab_size,) behind the last prompt token.
        computed: int64, ascending positions whose K/V were computed for this request.
        rows: int64, the positions of all rows that were run, those that several passes ran as often.
        num_corrected: Reused tokens that were corrected for drift and not computed.
        drift_work: What that took, a pass after the other: pairs of a run's sampled and corrected tokens.
        looks: What looks ran that ended in front of a layer: pairs of the positions and the number of that layer.
    """

    logits: Tensor
    computed: NDArray[np.int64]
    rows: NDArray[np.int64]
    num_corrected: int = 0
    drift_work: tuple[tuple[int, int], ...] = ()
    looks: tuple[tuple[NDArray[np.int64], int], ...] = ()

    def recomputed(self, plan: GraftPlan) -> int:
        """How many reused tokens were computed again."""
        return len(self.computed) - len(plan.compute)

    def recomputed_runs(self, plan: GraftPlan) -> tuple[tuple[int, int], ...]:
        """Ascending `(start, length)` of the reused tokens that were computed again.

        Complexity: O(num_tokens) in numpy, O(runs) besides.
        """
        is_again = np.zeros(plan.num_tokens, np.bool_)
        is_again[self.computed] = True
        is_again[plan.compute] = False
        return marked_runs(is_again)


def marked_runs(marks: NDArray[np.bool_]) -> tuple[tuple[int, int], ...]:
    """Return ascending `(start, length)` of the runs of true elements. O(elements) in numpy, O(runs) besides."""
    edges = np.flatnonzero(np.diff(marks, prepend=False, append=False))
    starts, stops = edges[::2], edges[1::2]
    return tuple(zip(starts.tolist(), (stops - starts).tolist(), strict=True))


def selection_context(plan: GraftPlan, token_ids: NDArray[np.integer] | None = None) -> SelectionContext:
    """Lay out what `plan` reuses approximately; spans that continue one another in donor and prompt are one run.

    Args:
        plan: Of the prompt.
        token_ids: The prompt; policies that draw do so by it.
    """
    computed = np.zeros(plan.num_tokens, dtype=bool)
    computed[plan.compute] = True
    positions: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
    distances: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
    run_start = 0
    previous: Match | None = None
    for span in plan.spans:
        if span.is_exact:
            continue  # nothing to choose from: computed again it would be the same
        if previous is None or not _continues(previous, span):
            run_start = span.target_start
        positions.append(np.arange(span.target_start, span.target_end))
        distances.append(positions[-1] - run_start)
        previous = span
    reused, distance = np.concatenate(positions), np.concatenate(distances)
    kept = ~computed[reused]
    seed = 0 if token_ids is None else zlib.crc32(np.ascontiguousarray(token_ids, np.int64).tobytes())
    return SelectionContext(plan.num_tokens, reused[kept], distance[kept], plan.compute, seed)


def _continues(previous: Match, span: Match) -> bool:
    return (
        previous.donor_id == span.donor_id
        and previous.target_end == span.target_start
        and previous.position_delta == span.position_delta
    )


class SparsePrefill:
    """The prefill of one prompt: rows to compute, in passes that its policy asks for and pieces that its caller cuts.

    Take `next_rows`, run them, hand the output to `receive`; in that order, until it returns an outcome. Reused K/V must lie
    in their slots before the first row is computed. How a pass is cut changes nothing but rounding.

    A policy that fails, at whatever step, is asked no more: every position behind the exact prefix is computed then, in
    order, over what was grafted and what earlier steps computed. No row attends to a position behind its own, so that nothing
    approximate is left.
    """

    def __init__(
        self,
        token_ids: TokenArray,
        plan: GraftPlan,
        kv_indices: NDArray[np.int64],
        policy: SelectionPolicy,
        *,
        swa_indices: NDArray[np.int64] | None = None,
        correction: DriftCorrection | None = None,
        num_layers: int | None = None,
        on_policy_error: Callable[[PolicyError], None] | None = None,
    ) -> None:
        """Ask the policy for its first step.

        Args:
            token_ids: int64 (num_tokens,), the prompt.
            plan: What is reused and computed.
            kv_indices: int64, slots by position.
            policy: Chooses reused tokens to compute again.
            swa_indices: As `kv_indices` of window layers, where these have slots of their own.
            correction: Of the drift of tokens that are not chosen, or None.
            num_layers: Of the model; None if it is not known here.
            on_policy_error: Is told, once, that the policy failed and that nothing will be grafted; None tells nobody.
        """
        self._token_ids = token_ids
        self._plan = plan
        self._kv_indices = kv_indices
        self._swa_indices = swa_indices
        self._correction = correction
        self._computed = np.zeros(plan.num_tokens, dtype=bool)
        self._context = selection_context(plan, token_ids)
        self._steps = PolicySteps(policy, self._context, num_layers=num_layers)
        self._on_policy_error = on_policy_error
        self._is_given_up = False
        self._corrected = np.zeros(plan.num_tokens, dtype=bool)
        self._run: list[NDArray[np.int64]] = []
        self._drift_work: list[tuple[int, int]] = []
        self._looks: list[tuple[NDArray[np.int64], int]] = []
        self._done = 0
        self._pending = 0
        try:
            first = self._steps.first()
        except PolicyError as error:
            first = self._give_up(error)
        self._begin_pass(first)

    @property
    def remaining(self) -> NDArray[np.int64]:
        """Positions that the present pass still has to compute, at least one; later passes may follow."""
        return self._rows[self._done :]

    def piece(self, limit: int) -> int:
        """How many rows `next_rows(limit)` gives: at most `limit` where a pass may be cut there.

        Rows of a run whose drift is measured are computed together, so that it may be more, by `drift_plan.MAX_RUN_ROWS`.
        """
        return self._drift.cut(self._done, self._done + limit) - self._done

    def next_rows(self, limit: int) -> SequenceRows:
        """The next `piece(limit)` rows of the present pass; the same until `receive` is called."""
        start, stop = self._done, self._done + self.piece(limit)
        self._pending = stop
        observed = max(0, stop - max(start, len(self._rows) - QUERY_ROWS)) if self._mass is not None else 0
        part = self._rows[start:stop]
        is_last = stop == len(self._rows) and not self._deviation_layer
        return SequenceRows(
            self._token_ids[part],
            part,
            self._kv_indices,
            num_logits=int(is_last),
            observed_rows=observed,
            swa_indices=self._swa_indices,
            seq_len=self._plan.num_tokens,
            drift=self._drift.between(start, stop),
            deviation_layer=self._deviation_layer,
        )

    def receive(self, output: SequenceOutput) -> PrefillOutcome | None:
        """Take the output of `next_rows`; returns the outcome when the prompt is computed."""
        if self._mass is not None and output.attention_mass is not None:
            seen = output.attention_mass.cpu().numpy()
            self._mass[: len(seen)] += seen
        if self._deviation is not None and output.key_deviation is not None:
            self._deviation[self._rows[self._done : self._pending]] = output.key_deviation.cpu().numpy()
        self._done = self._pending
        if self._done < len(self._rows):
            return None
        logits = self._end_pass(output)
        mass, deviation = self._mass, self._deviation
        while True:
            step = self._next_step(Observation(None if logits is None else logits.clone(), mass, deviation))
            if step is None:
                return self._outcome(logits)
            self._begin_pass(step)
            if len(self._rows):
                return None
            mass = deviation = None  # a step that chose nothing new is answered with what is known

    def _next_step(self, observation: Observation) -> Recompute | None:
        """What the policy wants next; the logits that it is shown are a copy, for those of the last step are served."""
        if self._is_given_up:
            return None
        try:
            return self._steps.send(observation)
        except PolicyError as error:
            return self._give_up(error)

    def _give_up(self, error: PolicyError) -> Recompute:
        """Ask the policy no more; returns the step that leaves nothing of the graft."""
        self._is_given_up = True
        self._steps.close()
        if self._on_policy_error is not None:
            self._on_policy_error(error)
        return Recompute(np.empty(0, np.int64), afresh=True)

    def _begin_pass(self, step: Recompute) -> None:
        self._deviation_layer = step.deviation_layer if step.observe_key_deviation else 0
        num_tokens = self._plan.num_tokens
        if self._deviation_layer or step.afresh:
            first = self._plan.exact_len if step.afresh else self._plan.exact_end
            self._rows = np.arange(min(first, num_tokens - 1), num_tokens)
        else:
            self._rows = _rows_of(step, self._plan, self._computed)
        self._mass = np.zeros(num_tokens, np.float32) if step.observe_query else None
        self._deviation = np.zeros(num_tokens, np.float32) if self._deviation_layer else None
        self._drift = DriftPlan(self._context, self._rows, step.sample, self._computed, self._correction)
        self._done = self._pending = 0

    def _end_pass(self, output: SequenceOutput) -> Tensor | None:
        """Note what the pass computed; returns the logits behind the prompt, if it got that far."""
        if self._deviation_layer:
            self._looks.append((self._rows, self._deviation_layer))
            return None
        self._run.append(self._rows)
        self._computed[self._rows] = True
        for run in self._drift.runs:
            self._corrected[run.rest] = True
            self._drift_work.append((len(run.sample), len(run.rest)))
        return output.logits[-1]

    def _outcome(self, logits: Tensor | None) -> PrefillOutcome:
        assert logits is not None, "the last step of a policy is served, and a look through some layers has no answer"
        computed = np.flatnonzero(self._computed)
        num_corrected = int((self._corrected & ~self._computed).sum())
        return PrefillOutcome(
            logits,
            computed,
            np.concatenate(self._run),
            num_corrected,
            drift_work=tuple(self._drift_work),
            looks=tuple(self._looks),
        )


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
