"""Compute chosen reused tokens of a prompt again, before SGLang computes the rows after them or once it has."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from kvgraft.errors import PolicyError
from kvgraft.graft.select import FirstK, Observation, expected_share, looks_at_query
from kvgraft.graft.steps import QUERY_ROWS, GraftSteps, Scope
from kvgraft.integrations.sglang.recompute.slot_attention import Look, PromptKV, Recomputation
from kvgraft.reuse.together import FailedTogetherError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from torch import Tensor

    from kvgraft.graft.drift import DriftCorrection
    from kvgraft.graft.select import SelectionPolicy
    from kvgraft.graft.steps import GraftWork, PlannedPass
    from kvgraft.integrations.sglang.donors.kv_buffers import KVBuffers
    from kvgraft.integrations.sglang.planning.ranks import Ranks
    from kvgraft.integrations.sglang.recompute.model import RowModel
    from kvgraft.integrations.sglang.recompute.slot_attention import SlotAttention
    from kvgraft.types import GraftPlan

T = TypeVar("T")
Attention = TypeVar("Attention", bound="SlotAttention")

MAX_LOOK_ROWS = 256
"""Rows after the last region that a look computes at most. The last ones of more see the regions and one another only, which
ranks tokens well enough and does not cost a second prefill."""


@dataclass(frozen=True, eq=False)
class Recomputer:
    """Carries a policy's steps out on K/V that lie in a request's own slots. Not thread-safe.

    All ranks take the same steps: these follow from the prompt and from attention summed over ranks.

    Attributes:
        correction: Of the drift of tokens that are not chosen; None for none.
        instead: Policy where a look at the query costs more than it saves.
        per_pass: Computed tokens that one more small pass is worth.
        share: Of copied tokens, what the policy chooses.
        max_rows: Rows of one pass; those of one corrected run may be more (`DriftPlan`).
    """

    model: RowModel
    buffers: KVBuffers
    policy: SelectionPolicy
    correction: DriftCorrection | None
    ranks: Ranks
    instead: SelectionPolicy = field(default_factory=FirstK)
    per_pass: float = 0.0
    share: float = 0.0
    max_rows: int = 2048

    def policy_for(self, num_reused: int, tail: int) -> SelectionPolicy | None:
        """Return the first of `policy` and `instead` that costs less than reuse saves, or None.

        Args:
            num_reused: Tokens that are copied.
            tail: Tokens after the last copy, which a look runs once more.
        """
        for policy in (self.policy, self.instead):
            cost = self.per_pass + (self.per_pass + min(tail, MAX_LOOK_ROWS) if looks_at_query(policy) else 0)
            if (1 - expected_share(policy)) * num_reused > cost:
                return policy
        return None

    def expected_rows(self, num_reused: int) -> int:
        """Return about how many rows are run for `num_reused` copied tokens: those chosen, a look and the query once more.

        What the settings say, without a question to the policy, which may fail on one rank.
        """
        return math.ceil(self.share * num_reused) + 2 * QUERY_ROWS

    def agreed_policy(self, num_reused: int, tail: int) -> tuple[SelectionPolicy | None, bool]:
        """Return `policy_for` of the same arguments, on all ranks at once, and whether the policy looks at the query.

        Raises:
            PolicyError: It fails to say, on this rank or on another.
        """

        def found() -> tuple[SelectionPolicy | None, bool]:
            policy = self.policy_for(num_reused, tail)
            return policy, policy is not None and looks_at_query(policy)

        return self.in_step(found, PolicyError)

    def run(self, token_ids: NDArray[np.int64], plan: GraftPlan, slots: Tensor, policy: SelectionPolicy) -> GraftWork:
        """Compute again the tokens that `policy` chooses.

        Args:
            token_ids: int64 (num_tokens,), the prompt.
            plan: Copied spans; they and all positions after them lie in slots of the request alone.
            slots: int64, of the positions before those that SGLang computes next, up to the end of the last copy.
            policy: One of those that `policy_for` returns.

        Raises:
            PolicyError: The policy failed, on this rank or on another; copied K/V are still there.
            RuntimeError: A pass failed so. Layers that it had reached hold new K/V, the others copies.

        On a GPU everything is queued on the stream that runs the model; where the policy looks, the scheduler waits for it.

        Complexity: two passes over `QUERY_ROWS` to `MAX_LOOK_ROWS` and over the chosen rows, attention included.
        """
        scope = Scope(end=len(slots), computed=plan.compute)
        with self.buffers.on_forward_stream():
            steps, kv = self._prepared(token_ids, plan, slots, policy, scope)
            return self._run(token_ids, kv, steps, steps.first)

    def repair(
        self, token_ids: NDArray[np.int64], plan: GraftPlan, slots: Tensor, policy: SelectionPolicy
    ) -> GraftWork:
        """Compute again the tokens that `policy` chooses when SGLang has computed the prompt, and the query rows after them.

        SGLang's passes were the one that answers; what they attended to they do not show. Arguments and errors as for `run`,
        but that `slots` are those of the whole prompt.
        """
        with self.buffers.on_forward_stream():
            steps, kv = self._prepared(token_ids, plan, slots, policy, None)
            answer = self.in_step(steps.answer, PolicyError)
            mass = self._look(token_ids, kv, steps.query) if answer.observe_query else None
            return self._run(token_ids, kv, steps, partial(steps.repair, Observation(None, mass)))

    def logits(self, token_ids: NDArray[np.int64], slots: Tensor) -> Tensor:
        """Return the logits (vocab_size,) after a prompt in `slots`, whose last token is computed once more over the others.

        Raises:
            RuntimeError: The pass failed on this rank or on another.
        """
        with self.buffers.on_forward_stream():
            kv, row = self.in_step(partial(PromptKV, self.buffers, slots), RuntimeError), np.array([len(token_ids) - 1])
            attention = self.in_step(partial(Recomputation, kv, row, None), RuntimeError)
            return self.in_step(partial(self.model.logits, token_ids[row], row, attention), RuntimeError)

    def _prepared(
        self,
        token_ids: NDArray[np.int64],
        plan: GraftPlan,
        slots: Tensor,
        policy: SelectionPolicy,
        scope: Scope | None,
    ) -> tuple[GraftSteps, PromptKV]:
        def made() -> tuple[GraftSteps, PromptKV]:
            steps = GraftSteps(plan, policy, token_ids=token_ids, correction=self.correction, scope=scope)
            return steps, PromptKV(self.buffers, slots)

        return self.in_step(made, PolicyError)

    def _run(
        self,
        token_ids: NDArray[np.int64],
        kv: PromptKV,
        steps: GraftSteps,
        begin: Callable[[], PlannedPass | None],
    ) -> GraftWork:
        planned = self.in_step(begin, PolicyError)
        while planned is not None:
            self._compute(token_ids, kv, planned)
            steps.ran(planned)
            observation = Observation(None, self._look(token_ids, kv, steps.query) if planned.observe_query else None)
            planned = self.in_step(partial(steps.next, observation), PolicyError)
        return steps.work()

    def in_step(self, act: Callable[[], T], failed: type[Exception]) -> T:
        """Return what `act` returns, on all ranks or on none, so that all go on alike.

        Raises:
            failed: It failed, on this rank or on another.
        """
        try:
            return self.ranks.together(act)
        except FailedTogetherError as error:
            if isinstance(error.origin, failed):
                raise error.origin from None
            raise failed(str(error)) from error.origin

    def run_all(self, token_ids: NDArray[np.int64], slots: Tensor, start: int) -> None:
        """Compute every position from `start`, the first one copied, up to the end of `slots`: nothing copied is left then.

        Gaps are computed again: they have attended to copies. Arguments as for `run`.

        Raises:
            RuntimeError: A pass failed on this rank or on another; copies may still be there.
        """
        with self.buffers.on_forward_stream():
            kv = self.in_step(partial(PromptKV, self.buffers, slots), RuntimeError)
            for first in range(start, len(kv), self.max_rows):
                rows = np.arange(first, min(first + self.max_rows, len(kv)))
                self._pass(token_ids, rows, partial(Recomputation, kv, rows, None))

    def _compute(self, token_ids: NDArray[np.int64], kv: PromptKV, planned: PlannedPass) -> None:
        rows, done = planned.rows, 0
        while done < len(rows):
            stop = planned.drift.cut(done, done + self.max_rows)
            part = rows[done:stop]
            self._pass(token_ids, part, partial(Recomputation, kv, part, planned.drift.between(done, stop)))
            done = stop

    def _look(self, token_ids: NDArray[np.int64], kv: PromptKV, query: NDArray[np.int64]) -> NDArray[np.float32]:
        """Sum the query's attention over all ranks.

        Rows: the query's, and those after the last region on which they depend and which have no K/V yet.
        """
        rows = np.union1d(query, np.arange(max(len(kv), len(token_ids) - MAX_LOOK_ROWS), len(token_ids)))
        look = self._pass(token_ids, rows, partial(Look, kv, rows, int(np.isin(rows, query).sum())))
        return np.asarray(self.ranks.total(look.mass.cpu()).numpy(), np.float32)

    def _pass(
        self, token_ids: NDArray[np.int64], rows: NDArray[np.int64], attention: Callable[[], Attention]
    ) -> Attention:
        """Run the model; ranks exchange sums in it, so none begins a pass where one has failed to, or another one."""
        made = self.in_step(attention, RuntimeError)
        self.in_step(partial(self.model.run, token_ids[rows], rows, made), RuntimeError)
        return made
