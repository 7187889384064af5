"""Passes over one prompt, run in pieces that the caller cuts, and the observations that they give its policy."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from kvgraft.errors import PolicyError
from kvgraft.graft.model import SequenceOutput, SequenceRows
from kvgraft.graft.select.base import Observation
from kvgraft.graft.steps import QUERY_ROWS, GraftSteps, GraftWork, PlannedPass

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray
    from torch import Tensor

    from kvgraft.types import TokenArray

    Planned = TypeVar("Planned", PlannedPass, PlannedPass | None)


class PromptPasses:
    """The passes of `steps`, one after the other.

    `begin` one, take `next_rows`, run them, hand the output to `receive`, in that order, until it returns an observation;
    `go_on` begins the next. Reused K/V must lie in their slots before the first row is computed. How a pass is cut changes
    nothing but rounding.

    A policy that fails, at any step, is asked no more: every position after the exact prefix is computed then, in order, over
    what was grafted and what earlier steps computed, so that nothing approximate is left.
    """

    def __init__(
        self,
        token_ids: TokenArray,
        kv_indices: NDArray[np.int64],
        steps: GraftSteps,
        *,
        swa_indices: NDArray[np.int64] | None,
        state: int | None,
        snapshots: Mapping[int, int],
        on_policy_error: Callable[[PolicyError], None] | None,
    ) -> None:
        """Begin nothing yet; arguments as for `SparsePrefill`."""
        self._on_policy_error = on_policy_error
        self._token_ids = token_ids
        self._kv_indices = kv_indices
        self._swa_indices = swa_indices
        self._state = state
        self._snapshots = snapshots
        self._steps = steps
        self._logits: Tensor | None = None
        self._done = self._pending = 0

    @property
    def logits(self) -> Tensor:
        """Logits after the last prompt token as of the last pass that gave any, float32 (vocab_size,)."""
        assert self._logits is not None, "a policy's last step is served, and a look through some layers has no answer"
        return self._logits

    @property
    def is_given_up(self) -> bool:
        """Whether the policy failed."""
        return self._steps.is_given_up

    @property
    def remaining(self) -> NDArray[np.int64]:
        """Positions that the present pass still has to compute, at least one; later passes may follow."""
        return self._pass.rows[self._done :]

    @property
    def shows_nothing(self) -> bool:
        """Whether the present pass runs through all layers and is not looked at: other rows may ride after its last one."""
        return not (self._pass.observe_query or self._pass.deviation_layer)

    def begin(self, plan: Callable[[], PlannedPass]) -> None:
        """Begin the first pass, which `plan` returns."""
        self._begin(self._planned(plan))

    def go_on(self, observation: Observation) -> bool:
        """Begin the next pass with rows that the policy wants after `observation`; False if there is none."""
        return self._go_on(observation, self._steps.next)

    def repair(self, observation: Observation) -> bool:
        """Begin the first pass after the one that answered, which showed `observation`; False if there is none."""
        return self._go_on(observation, self._steps.repair)

    def give_up(self, error: PolicyError) -> None:
        """Begin the pass that computes everything, in place of one whose drift correction failed."""
        self._begin(self._given_up(error))

    def _go_on(self, observation: Observation, plan: Callable[[Observation], PlannedPass | None]) -> bool:
        while True:
            planned = self._planned(partial(plan, observation))
            if planned is None:
                return False
            self._begin(planned)
            if len(planned.rows):
                return True
            # A step that chose nothing new is answered with what is known.
            plan, observation = self._steps.next, Observation(self._shown_logits(), None, None)

    def piece(self, limit: int) -> int:
        """Return how many rows `next_rows(limit)` gives: at most `limit` where a pass may be cut there.

        Rows of a run whose drift is measured are computed together, so that it may be more, by `drift_plan.MAX_RUN_ROWS`.
        """
        return self._pass.drift.cut(self._done, self._done + limit) - self._done

    def is_last(self, limit: int) -> bool:
        """Return whether `next_rows(limit)` gives the last rows of the present pass."""
        return self._done + self.piece(limit) == len(self._pass.rows)

    def next_rows(self, limit: int) -> SequenceRows:
        """Return the next `piece(limit)` rows of the present pass; the same until `receive` is called."""
        planned, start, stop = self._pass, self._done, self._done + self.piece(limit)
        self._pending = stop
        first_observed = max(start, len(planned.rows) - QUERY_ROWS)
        part = planned.rows[start:stop]
        is_last = stop == len(planned.rows) and not planned.deviation_layer
        return SequenceRows(
            self._token_ids[part],
            part,
            self._kv_indices,
            num_logits=int(is_last),
            observed_rows=max(0, stop - first_observed) if planned.observe_query else 0,
            swa_indices=self._swa_indices,
            state=self._state,
            snapshots=self._snapshots,
            seq_len=len(self._token_ids),
            drift=planned.drift.between(start, stop),
            deviation_layer=planned.deviation_layer,
        )

    def receive(self, output: SequenceOutput) -> Observation | None:
        """Take the output of `next_rows`; return what the pass showed once it is done."""
        planned = self._pass
        if self._mass is not None and output.attention_mass is not None:
            seen = output.attention_mass.cpu().numpy()
            self._mass[: len(seen)] += seen
        if self._deviation is not None and output.key_deviation is not None:
            self._deviation[planned.rows[self._done : self._pending]] = output.key_deviation.cpu().numpy()
        self._done = self._pending
        if self._done < len(planned.rows):
            return None
        self._steps.ran(planned)
        self._logits = None if planned.deviation_layer else output.logits[0]
        return Observation(self._shown_logits(), self._mass, self._deviation)

    def work(self) -> GraftWork:
        """Return the work of all passes that were run."""
        return self._steps.work()

    def _shown_logits(self) -> Tensor | None:
        """Return a copy: the logits of the last step are served."""
        return None if self._logits is None else self._logits.clone()

    def _begin(self, planned: PlannedPass) -> None:
        num_tokens = len(self._token_ids)
        self._pass = planned
        self._mass = np.zeros(num_tokens, np.float32) if planned.observe_query else None
        self._deviation = np.zeros(num_tokens, np.float32) if planned.deviation_layer else None
        self._done = self._pending = 0

    def _planned(self, plan: Callable[[], Planned]) -> Planned | PlannedPass:
        try:
            return plan()
        except PolicyError as error:
            return self._given_up(error)

    def _given_up(self, error: PolicyError) -> PlannedPass:
        planned = self._steps.give_up()
        if self._on_policy_error is not None:
            self._on_policy_error(error)
        return planned
