"""The policy-step loop, sans I/O: rows to run for one prompt, pass by pass, and the work that they add up to.

`GraftSteps` is state that an engine drives: it plans a pass, the engine runs its rows in pieces of any size and at any time,
reports the pass as run, and asks for the next one. So all engines run the same rows; each has its own way to run a forward
pass, to apply drift and to read attention.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.graft.drift_plan import DriftPlan
from kvgraft.graft.select.base import Recompute
from kvgraft.graft.select.context import selection_context
from kvgraft.graft.select.guard import PolicySteps

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvgraft.graft.drift import DriftCorrection
    from kvgraft.graft.select.base import Observation, SelectionPolicy
    from kvgraft.types import GraftPlan

QUERY_ROWS = 64
"""At most this many of the last live rows count as the query; longer questions say little more and cost attention."""

_NOTHING = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Scope:
    """The part of a prompt that an engine runs step by step; by default all of it.

    Attributes:
        end: First position that the engine computes by itself afterwards; None for the end of the prompt.
        computed: int64, positions that it computed before the first step; those after `end` may be among them.
        is_forgetful: Each pass has to compute again what earlier ones computed.
        longest_run: Tokens of a run that can be corrected in one piece; None for no limit.
        num_layers: Of the model; None where the engine chooses the layer for comparisons of keys.
    """

    end: int | None = None
    computed: NDArray[np.int64] = field(default_factory=_NOTHING.copy)
    is_forgetful: bool = False
    longest_run: int | None = None
    num_layers: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PlannedPass:
    """One forward pass over a prompt.

    Attributes:
        rows: int64, ascending positions to compute; may be empty.
        drift: Runs to correct, and where the rows may be cut.
        observe_query: Whether the policy wants to see the attention of the query.
        deviation_layer: Layer whose new keys are compared with the reused ones, at which the rows end; 0 for all layers.
    """

    rows: NDArray[np.int64]
    drift: DriftPlan
    observe_query: bool = False
    deviation_layer: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class GraftWork:
    """The work of all passes over a prompt.

    Attributes:
        computed: int64, ascending positions with computed K/V, those of `Scope.computed` included.
        recomputed_runs: Ascending `(start, length)` of those of them in spans that are not exact; none after giving up.
        num_corrected: Reused tokens that were corrected for drift and not computed.
        rows: int64, the rows of all passes, one pass after the other; rows of several passes count as often.
        drift_work: Per corrected run, pass by pass, the numbers of its sampled and of its corrected tokens.
        looks: Rows of each pass that ended at a layer's keys, and the number of that layer.
    """

    computed: NDArray[np.int64]
    recomputed_runs: tuple[tuple[int, int], ...]
    num_corrected: int
    rows: NDArray[np.int64]
    drift_work: tuple[tuple[int, int], ...]
    looks: tuple[tuple[NDArray[np.int64], int], ...]


class GraftSteps:
    """Masks of what is computed and corrected for one prompt, and the passes that a policy asks for.

    Plan a pass with `first`, run it, report it to `ran`, ask `next` for another until there is none. After a `PolicyError` at
    any step, run the pass of `give_up`, which leaves nothing approximate: no row attends to a position after its own.

    To repair after the first token, begin with `answer` in place of `first`: a pass over the live rows alone, after which the
    first token is drawn. `repair` plans the policy's choice from there, and `next` goes on as before. Both ways leave the
    same K/V where the query is all that is live after the last span.
    """

    def __init__(
        self,
        plan: GraftPlan,
        policy: SelectionPolicy,
        *,
        token_ids: NDArray[np.integer] | None = None,
        correction: DriftCorrection | None = None,
        scope: Scope | None = None,
    ) -> None:
        """Ask the policy nothing yet; `token_ids` seed policies that draw, `correction` is for tokens that are not chosen."""
        self.plan = plan
        self._context = selection_context(plan, token_ids)
        self._correction = correction
        self._scope = scope = scope or Scope()
        self._end = plan.num_tokens if scope.end is None else scope.end
        self._policy = PolicySteps(policy, self._context, num_layers=scope.num_layers)
        self._is_given_up = False
        self._put_off: Recompute | None = None
        self._looks_at_query = False
        self._live = plan.compute[plan.compute < self._end]
        self._computed = np.zeros(plan.num_tokens, np.bool_)
        self._computed[scope.computed] = True
        self._afresh_from = self._first_copied()
        self._corrected = np.zeros(plan.num_tokens, np.bool_)
        self._rows: list[NDArray[np.int64]] = []
        self._drift_work: list[tuple[int, int]] = []
        self._looks: list[tuple[NDArray[np.int64], int]] = []

    @property
    def is_given_up(self) -> bool:
        """Whether the policy failed: nothing approximate is left once the pass of `give_up` was run."""
        return self._is_given_up

    @property
    def query(self) -> NDArray[np.int64]:
        """Ascending positions of the query: the last rows that are computed anyway."""
        return self.plan.compute[-QUERY_ROWS:]

    def first(self) -> PlannedPass:
        """Plan the policy's first pass.

        Raises:
            PolicyError: The policy failed; continue with `give_up`.
        """
        return self.plan_pass(self._policy.first())

    def answer(self) -> PlannedPass:
        """Plan the pass over the live rows alone; it is the policy's first look where that is one at the query.

        Raises:
            PolicyError: The policy failed; continue with `give_up`.
        """
        step = self._policy.first()
        is_look = not len(step.positions) and not step.observe_key_deviation and not step.afresh
        self._put_off = None if is_look else step
        self._looks_at_query = bool(step.observe_query)
        return self.plan_pass(step if is_look else Recompute(_NOTHING))

    def repair(self, observation: Observation) -> PlannedPass | None:
        """Plan the policy's choice, once every live row of the prompt has been computed; None if it chooses nothing.

        Args:
            observation: Of the pass of `answer`. Where the policy looks at the query and the engine could not show that, the
                pass returned is that look, over the query rows once more.

        Raises:
            PolicyError: The policy failed; continue with `give_up`.
        """
        self._end = self.plan.num_tokens
        self._live = self.plan.compute
        self._computed[self._live] = True
        if self._put_off is not None:
            return self.plan_pass(self._put_off)
        if self._looks_at_query and observation.attention_mass is None:
            return PlannedPass(self.query, DriftPlan(len(self.query)), observe_query=True)
        return self.next(observation)

    def next(self, observation: Observation) -> PlannedPass | None:
        """Plan the pass that the policy wants after what the last one showed; None if it wants no more, or was given up.

        Raises:
            PolicyError: The policy failed; continue with `give_up`.
        """
        step = None if self._is_given_up else self._policy.send(observation)
        return None if step is None else self.plan_pass(step)

    def give_up(self) -> PlannedPass:
        """Ask the policy no more and plan a pass over everything that is copied or was computed since."""
        self._is_given_up = True
        self._policy.close()
        return self.plan_pass(Recompute(_NOTHING, afresh=True))

    def plan_pass(self, step: Recompute) -> PlannedPass:
        """Plan the pass of a step over what is computed by now. O(num_tokens)."""
        rows = self._rows_of(step)
        max_length = self._scope.longest_run
        drift = DriftPlan.of(self._context, rows, step.sample, self._computed, self._correction, max_length=max_length)
        layer = step.deviation_layer if step.observe_key_deviation else 0
        return PlannedPass(rows, drift, bool(step.observe_query), layer)

    def ran(self, planned: PlannedPass) -> None:
        """Record that all rows of a pass were run and its runs corrected."""
        if planned.deviation_layer:
            self._looks.append((planned.rows, planned.deviation_layer))
            return
        self._rows.append(planned.rows)
        self._computed[planned.rows] = True
        for run in planned.drift.runs:
            self._corrected[run.rest] = True
            self._drift_work.append((len(run.sample), len(run.rest)))

    def work(self) -> GraftWork:
        """Return the work of the passes that were run so far. O(num_tokens) in numpy."""
        is_again, reused = np.zeros_like(self._computed), self._context.reused
        is_again[reused] = self._computed[reused] & (not self._is_given_up)
        return GraftWork(
            np.flatnonzero(self._computed),
            _marked_runs(is_again),
            int((self._corrected & ~self._computed).sum()),
            np.concatenate([_NOTHING, *self._rows]),
            tuple(self._drift_work),
            tuple(self._looks),
        )

    def _rows_of(self, step: Recompute) -> NDArray[np.int64]:
        """Return new positions, on the first step with all live rows, and the query rows after them once more.

        Live rows before the query are not run again: it would cost a second prefill of every new passage and changes the
        answer less than we can measure (docs/adr/0001).
        """
        if step.afresh:
            return np.arange(self._afresh_from, self._end)
        if step.observe_key_deviation:
            return np.arange(min(self.plan.settled_end, self._end - 1), self._end)
        wanted = np.union1d(step.positions, self._live)
        new = wanted[~self._computed[wanted]]
        if not len(new):
            return new
        if self._scope.is_forgetful:
            return np.union1d(new, np.flatnonzero(self._computed))
        query = self.query
        return np.union1d(new, query[(query > new[0]) & (query < self._end)])

    def _first_copied(self) -> int:
        """Return the first position after the exact prefix that was not computed before the first step."""
        is_kept = self._computed[: self._end].copy()
        is_kept[: self.plan.prefix_len] = True
        is_kept[-1] = False
        return int(np.argmin(is_kept))


def _marked_runs(marks: NDArray[np.bool_]) -> tuple[tuple[int, int], ...]:
    """Return ascending `(start, length)` of the runs of true elements. O(elements) in numpy, O(runs) besides."""
    edges = np.flatnonzero(np.diff(marks, prepend=False, append=False))
    starts, stops = edges[::2], edges[1::2]
    return tuple(zip(starts.tolist(), (stops - starts).tolist(), strict=True))
