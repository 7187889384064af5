"""Compute chosen reused tokens of a prompt again, before SGLang computes what stands behind them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from kvgraft.errors import PolicyError
from kvgraft.graft.drift_plan import DriftPlan
from kvgraft.graft.select import FirstK, Observation, PolicySteps, expected_share, looks_at_query
from kvgraft.graft.sparse_prefill import QUERY_ROWS, marked_runs, selection_context
from kvgraft.integrations.sglang.recompute.slot_attention import Look, PromptKV, Recomputation

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from torch import Tensor

    from kvgraft.graft.drift import DriftCorrection
    from kvgraft.graft.select import Recompute, SelectionContext, SelectionPolicy
    from kvgraft.integrations.sglang.donors.kv_buffers import KVBuffers
    from kvgraft.integrations.sglang.planning.ranks import Ranks
    from kvgraft.integrations.sglang.recompute.model import RowModel
    from kvgraft.types import GraftPlan

MAX_LOOK_ROWS = 256
"""Rows behind the last region that a look computes at most. Of longer ones the last see the regions and one another only,
which ranks tokens well enough and does not cost a second prefill."""


class Recomputed(NamedTuple):
    """Ascending `(start, length)` of reused tokens that were computed again, and how many others were corrected."""

    runs: tuple[tuple[int, int], ...]
    corrected: int


@dataclass(frozen=True, eq=False)
class Recomputer:
    """Carries a policy's steps out on K/V that lie in a request's own slots. Not thread-safe.

    All ranks take the same steps: these follow from the prompt and from attention summed over ranks.

    Attributes:
        model: Computes rows.
        buffers: Where K/V lie.
        policy: Chooses.
        instead: Chooses where a look at the query costs more than it saves.
        per_pass: Computed tokens that one more small pass is worth.
        correction: What is done about the drift of tokens that are not chosen; None for nothing.
        ranks: Sum attention.
        max_rows: Rows of one pass; a run whose drift is measured may exceed it (`DriftPlan`).
    """

    model: RowModel
    buffers: KVBuffers
    policy: SelectionPolicy
    correction: DriftCorrection | None
    ranks: Ranks
    instead: SelectionPolicy = field(default_factory=FirstK)
    per_pass: float = 0.0
    max_rows: int = 2048

    def policy_for(self, num_reused: int, tail: int) -> SelectionPolicy | None:
        """Return the first of `policy` and `instead` that costs less than reuse saves, or None.

        Args:
            num_reused: Tokens that are copied.
            tail: Tokens behind the last copy, which a look runs once more.
        """
        for policy in (self.policy, self.instead):
            cost = self.per_pass + (self.per_pass + min(tail, MAX_LOOK_ROWS) if looks_at_query(policy) else 0)
            if (1 - expected_share(policy)) * num_reused > cost:
                return policy
        return None

    def run(self, token_ids: NDArray[np.int64], plan: GraftPlan, slots: Tensor, policy: SelectionPolicy) -> Recomputed:
        """Compute again what `policy` chooses.

        Args:
            token_ids: int64 (num_tokens,), the prompt.
            plan: What was copied where; reused positions lie in slots of the request alone, and so does all behind them.
            slots: int64, of the positions in front of what SGLang computes next, behind the last copy.
            policy: One of those that `policy_for` gives.

        Raises:
            PolicyError: The policy failed; what was copied is still there.
            Exception: A pass failed on this rank. Layers that it had reached hold new K/V, the others what was copied.

        On a GPU everything is queued on the stream that runs the model; where the policy looks, the scheduler waits for it.

        Complexity: two passes over `QUERY_ROWS` to `MAX_LOOK_ROWS` and over the chosen rows, attention included.
        """
        with self.buffers.on_forward_stream():
            if slots.is_cuda:  # the caller's stream must not reuse their memory before the passes are over
                slots.record_stream(torch.cuda.current_stream(slots.device))
            return self._run(_Prompt(token_ids, plan, PromptKV(self.buffers, slots)), policy)

    def _run(self, prompt: _Prompt, policy: SelectionPolicy) -> Recomputed:
        token_ids, plan = prompt.token_ids, prompt.plan
        context = selection_context(plan, token_ids)
        steps = PolicySteps(policy, context)
        step = self._agreed(steps.first)
        computed, corrected = np.zeros(plan.num_tokens, np.bool_), np.zeros(plan.num_tokens, np.bool_)
        while step is not None:
            self._compute(prompt, context, step, computed, corrected)
            observation = Observation(None, self._look(prompt) if step.observe_query else None)
            step = self._agreed(partial(steps.send, observation))
        is_again = np.zeros(plan.num_tokens, np.bool_)
        is_again[context.reused] = computed[context.reused]
        return Recomputed(marked_runs(is_again), int((corrected & ~computed).sum()))

    def _agreed(self, ask: Callable[[], Recompute | None]) -> Recompute | None:
        """Ask the policy; where it fails on one rank it has failed on all, which then run the same passes."""
        step, failure = None, None
        try:
            step = ask()
        except PolicyError as error:
            failure = error
        if self.ranks.total(torch.tensor([float(failure is not None)])).any():
            raise failure or PolicyError("the selection policy failed on another rank")
        return step

    def run_all(self, token_ids: NDArray[np.int64], slots: Tensor, start: int) -> None:
        """Compute every position from `start`, the first one copied, up to the end of `slots`: nothing copied is left then.

        What was computed in gaps is computed again: it has attended to copies. Arguments as for `run`.

        Raises:
            Exception: A pass failed on this rank; what was copied may still be there.
        """
        with self.buffers.on_forward_stream():
            if slots.is_cuda:
                slots.record_stream(torch.cuda.current_stream(slots.device))
            kv = PromptKV(self.buffers, slots)
            for first in range(start, len(kv), self.max_rows):
                rows = np.arange(first, min(first + self.max_rows, len(kv)))
                self.model.run(token_ids[rows], rows, Recomputation(kv, rows, None))

    def _compute(
        self,
        prompt: _Prompt,
        context: SelectionContext,
        step: Recompute,
        computed: NDArray[np.bool_],
        corrected: NDArray[np.bool_],
    ) -> None:
        """Compute a step's new positions, and the query rows in gaps behind them once more, as the other engines do."""
        new = step.positions[~computed[step.positions]]
        if not len(new):
            return
        rows = np.union1d(new, prompt.query[(prompt.query > new[0]) & (prompt.query < len(prompt.kv))])
        drift = DriftPlan(context, rows, step.sample, computed, self.correction)
        done = 0
        while done < len(rows):
            stop = drift.cut(done, done + self.max_rows)
            attention = Recomputation(prompt.kv, rows[done:stop], drift.between(done, stop))
            self.model.run(prompt.token_ids[rows[done:stop]], rows[done:stop], attention)
            done = stop
        computed[rows] = True
        for run in drift.runs:
            corrected[run.rest] = True

    def _look(self, prompt: _Prompt) -> NDArray[np.float32]:
        """Sum what the query attends to, over all ranks; one that fails makes all of them fail."""
        rows = prompt.look_rows
        look = Look(prompt.kv, rows, int(np.isin(rows, prompt.query).sum()))
        failure: Exception | None = None
        try:
            self.model.run(prompt.token_ids[rows], rows, look)
        except Exception as error:  # noqa: BLE001 - raised below, when the other ranks know
            failure = error
        told = torch.cat([look.mass.cpu(), torch.tensor([float(failure is not None)])])
        total = self.ranks.total(told).numpy()
        if failure is not None:
            raise failure
        if total[-1]:
            raise RuntimeError("another rank could not look at the query's attention")
        return np.asarray(total[:-1], np.float32)


class _Prompt(NamedTuple):
    """What passes work on."""

    token_ids: NDArray[np.int64]
    plan: GraftPlan
    kv: PromptKV

    @property
    def query(self) -> NDArray[np.int64]:
        """The last rows that are computed anyway, in gaps and behind the last region."""
        return self.plan.compute[-QUERY_ROWS:]

    @property
    def look_rows(self) -> NDArray[np.int64]:
        """The query's rows, and those behind the last region on which they depend."""
        first = max(len(self.kv), self.plan.num_tokens - MAX_LOOK_ROWS)
        return np.union1d(self.query, np.arange(first, self.plan.num_tokens))
