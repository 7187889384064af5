"""Copies for a request: load spans when SGLang has slots for them, and compute chosen tokens of them again."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from kvgraft.errors import PolicyError
from kvgraft.types import Fidelity

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from kvgraft.graft.select import SelectionPolicy
    from kvgraft.graft.steps import GraftWork
    from kvgraft.integrations.sglang.donors.loader import Loader
    from kvgraft.integrations.sglang.recompute.recomputer import Recomputer
    from kvgraft.integrations.sglang.reporting.reports import RequestLog
    from kvgraft.integrations.sglang.request_state import SGLangRequest
    from kvgraft.types import GraftPlan, SpanReport

    Passes = Callable[[NDArray[np.int64], GraftPlan, Tensor, SelectionPolicy], GraftWork]


@dataclass(eq=False)
class Copies:
    """Carries decisions out. Not thread-safe. A `req` is SGLang's `Req`.

    Attributes:
        min_run: Shortest run that is loaded.
        recomputer: Computes chosen tokens again; None where that is left to SGLang.
    """

    loader: Loader
    log: RequestLog
    min_run: int
    recomputer: Recomputer | None = None

    def load_first(self, state: SGLangRequest, req: Any, promised: int) -> int:  # noqa: ANN401
        """Load what touches the exact prefix, all that was promised or nothing; returns the number of tokens."""
        slots = self._load(state, req, promised)
        if slots is None:
            return 0
        state.holds(slots)
        return len(slots)

    def load_next(self, state: SGLangRequest, req: Any, room: int) -> Tensor | None:  # noqa: ANN401
        """Load the regions that begin where the computed part of `req`, between two chunks, ends.

        At most `room` slots are taken, so that running requests are not in danger. Returns those of the positions from
        `req.prefix_len` on, for the caller to write into the row; None for nothing.
        """
        state.goes_on(req.prefix_len, self.min_run)
        total = sum(span.length for span in state.adjoining(req.prefix_len))
        return self._load(state, req, total if total <= room else -1) if total else None

    def _load(self, state: SGLangRequest, req: Any, expected: int) -> Tensor | None:  # noqa: ANN401
        state.started()
        slots = self.loader.load(state, req.prefix_len, expected)
        if slots is not None:
            req.skip_radix_cache_insert = True  # nothing approximate is ever published, and copies belong to the row
        return slots

    def recompute(self, state: SGLangRequest, req: Any, slots: Tensor) -> None:  # noqa: ANN401
        """Compute chosen tokens of what was loaded again, before SGLang computes from `len(slots)` (int64) on."""
        if self.recomputer is not None:
            self._recompute(state, req, slots, self.recomputer.run)
        elif state.has_shifted:
            state.repaired()  # what is chosen are gaps, which SGLang computes

    def repair(self, state: SGLangRequest, req: Any, slots: Tensor) -> None:  # noqa: ANN401
        """Compute chosen tokens again once SGLang has computed the prompt, which lies in `slots` (int64)."""
        state.load_only()
        if self.recomputer is not None:
            self._recompute(state, req, slots, self.recomputer.repair)

    def _recompute(self, state: SGLangRequest, req: Any, slots: Tensor, passes: Passes) -> None:  # noqa: ANN401
        recomputer = self.recomputer
        if recomputer is None or not state.has_shifted:
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
            work = passes(tokens, plan, slots[: len(tokens)], policy)
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
    """Return the prompt, without output that was drawn before a retraction, and its plan with `spans`."""
    tokens = _tokens(req, state.prompt.prompt_len)
    return tokens, state.plan(len(tokens), spans)
