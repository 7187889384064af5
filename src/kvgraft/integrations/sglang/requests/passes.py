"""Passes over chosen tokens of what a request has copied, and what becomes of the request where one fails."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from kvgraft.errors import PolicyError
from kvgraft.types import Fidelity, GraftPlan, Match

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from kvgraft.graft.select import SelectionPolicy
    from kvgraft.graft.steps import GraftWork
    from kvgraft.integrations.sglang.recompute.recomputer import Recomputer
    from kvgraft.integrations.sglang.reporting.reports import RequestLog
    from kvgraft.integrations.sglang.requests.request import SGLangRequest
    from kvgraft.reuse.lineage import Lineage
    from kvgraft.types import SpanReport

    Run = Callable[[NDArray[np.int64], GraftPlan, Tensor, SelectionPolicy], GraftWork]


@dataclass(eq=False)
class PolicyPasses:
    """Computes chosen tokens again. Not thread-safe. A `req` is SGLang's `Req`.

    Attributes:
        recomputer: Runs the passes; None where what is chosen is left to SGLang.
    """

    log: RequestLog
    recomputer: Recomputer | None = None

    def before(self, state: SGLangRequest, req: Any, slots: Tensor) -> None:  # noqa: ANN401
        """Compute chosen tokens of what was loaded, before SGLang computes from `len(slots)` (int64) on."""
        if self.recomputer is not None:
            self._compute(state, req, slots, self.recomputer, self.recomputer.run)
        elif state.has_shifted:
            state.repaired()  # what is chosen are gaps, which SGLang computes

    def after(self, state: SGLangRequest, req: Any, slots: Tensor) -> None:  # noqa: ANN401
        """Compute chosen tokens once SGLang has computed the prompt, which lies in `slots` (int64)."""
        state.load_only()
        if self.recomputer is not None:
            self._compute(state, req, slots, self.recomputer, self.recomputer.repair)

    def logits(self, state: SGLangRequest, req: Any, slots: Tensor) -> Tensor:  # noqa: ANN401
        """Return the logits (vocab_size,) after the prompt in `slots` (int64) of a request that waited for its repair.

        Raises:
            RuntimeError: The pass failed, on this rank or on another.
        """
        assert self.recomputer is not None, "no request waits without"
        return self.recomputer.logits(_tokens(req, state.prompt.num_tokens), slots)

    def _compute(self, state: SGLangRequest, req: Any, slots: Tensor, recomputer: Recomputer, run: Run) -> None:  # noqa: ANN401
        if not state.has_shifted:
            return
        try:
            policy, looks = recomputer.agreed_policy(*state.extent())
        except PolicyError as error:
            state.take_loaded()
            self._compute_copied(recomputer, state, req, slots, error)
            return
        if policy is None or (looks and state.due):  # a look comes after the last region
            return
        spans = tuple(span for span in state.take_loaded() if span.fidelity is Fidelity.SHIFTED)
        if not spans:
            return
        started = time.perf_counter()
        try:
            tokens, plan = recomputer.in_step(partial(_carried_out, state, req, spans), RuntimeError)
            work = run(tokens, plan, slots[: len(tokens)], policy)
            recomputer.in_step(partial(state.recomputed, policy.name, work), RuntimeError)
        except PolicyError as error:
            self._compute_copied(recomputer, state, req, slots, error)
        except RuntimeError as error:  # a pass failed, on all ranks; what was copied is as approximate as before
            self.log.failed("recompute", state.rid, error)
            state.left_as_copied()
        state.passes_took(1e3 * (time.perf_counter() - started))

    def _compute_copied(
        self,
        recomputer: Recomputer,
        state: SGLangRequest,
        req: Any,  # noqa: ANN401
        slots: Tensor,
        error: Exception,
    ) -> None:
        """The policy failed: compute everything from the first shifted copy on, and load nothing more.

        Where that fails, too, the request goes on with its copies, as after any pass that fails. It stays approximate:
        nothing of it is published, its donors have a generation, its report names its spans and policy `none`.
        """
        state.load_only()
        state.missed(self.log.failed("selection policy", state.rid, error))
        start = min(span.target_start for span in state.lineage.spans if span.fidelity is Fidelity.SHIFTED)
        try:
            recomputer.run_all(_tokens(req, state.prompt.num_tokens), slots, start)
        except RuntimeError as failure:  # on all ranks, as well
            self.log.failed("recompute", state.rid, failure)
            state.left_as_copied()
            return
        state.computed_from(start)


def _tokens(req: Any, count: int) -> NDArray[np.int64]:  # noqa: ANN401
    return np.frombuffer(req.full_untruncated_fill_ids[:count], np.int64)


def _carried_out(
    state: SGLangRequest,
    req: Any,  # noqa: ANN401
    spans: Sequence[SpanReport],
) -> tuple[NDArray[np.int64], GraftPlan]:
    """Return the prompt, without output that was drawn before a retraction, and its plan with `spans` to be looked at."""
    tokens, lineage = _tokens(req, state.prompt.prompt_len), state.lineage
    computed = np.ones(len(tokens), np.bool_)
    computed[: lineage.prefix_len] = False
    for span in lineage.spans:
        computed[span.target_start : span.target_start + span.length] = False
    matches = tuple(Match(span.target_start, span.donor_id, span.donor_start, span.length) for span in spans)
    return tokens, GraftPlan(len(tokens), _settled_end(lineage), matches, np.flatnonzero(computed))


def _settled_end(lineage: Lineage) -> int:
    """Return the end of the exact prefix and of what was copied right after it in its own place."""
    end = lineage.prefix_len
    for span in lineage.spans:
        if span.target_start != end or span.fidelity not in (Fidelity.EXACT, Fidelity.CONTINUED):
            break
        end += span.length
    return end
