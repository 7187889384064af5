"""Repair after the first token: which requests wait for it, and the step before which it comes.

SGLang computes a prompt, sends the first token and hands the row of that token to the model in a later step. Before that step
the choice of the policy is computed into the request's own slots. The step is fixed by the request, never by load. A request
that was retracted goes on with its answer from repaired copies, as if it had not been.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from kvgraft.graft.select import says_much_twice
from kvgraft.reuse.repair_time import ONE_TOKEN, REPEATS, planned_repair
from kvgraft.types import Fidelity

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterable

    from torch import Tensor

    from kvgraft.integrations.sglang.copies import Copies
    from kvgraft.integrations.sglang.request_state import SGLangRequest
    from kvgraft.reuse.repair_time import RepairPlan
    from kvgraft.types import RepairTime


BEGUN = "its answer was begun before a retraction"
"""Reason to wait of a request whose next token is not its first one: all but that are drawn from what was repaired."""


MOST_ROWS = 2048
"""Rows that repairs take in one step, of all requests together, while other answers stream: as many as one pass takes."""


@dataclass(eq=False)
class Repairs:
    """Decides when the tokens that a policy chooses are computed. Not thread-safe. A `req` is SGLang's `Req`.

    Attributes:
        copies: Computes them.
        refusal: Why this server makes no passes of its own after the first token; empty if it does.
        most_rows: See `MOST_ROWS`. A request whose repair alone takes more is repaired in a step of its own.
        waiting: Requests that are not repaired yet; the same on all ranks.
    """

    copies: Copies
    refusal: str = ""
    most_rows: int = MOST_ROWS
    waiting: WeakKeyDictionary[Any, SGLangRequest] = field(default_factory=WeakKeyDictionary, init=False)

    def planned(self, asked: RepairTime, num_tokens_left: int, num_drawn: int = 0) -> RepairPlan:
        """Return when a request that `asked` for a time is repaired.

        Args:
            asked: By the request or the settings.
            num_tokens_left: Tokens that it may still generate.
            num_drawn: Tokens of its answer that were drawn before a retraction.
        """

        def reason_to_wait() -> str:
            return self.refusal or (ONE_TOKEN if num_tokens_left <= 1 else "") or (BEGUN if num_drawn else "")

        return planned_repair(asked, reason_to_wait)

    def planned_for(self, state: SGLangRequest, tokens: array[int]) -> RepairPlan:
        """Return when a decided request is repaired: what it copies may be a reason to wait. The same on all ranks."""

        def reason_to_wait() -> str:
            due = [(span.start, span.length) for span in state.due if span.fidelity is Fidelity.SHIFTED]
            if self.copies.recomputer is None or not due:
                return ""
            return REPEATS if says_much_twice(np.frombuffer(tokens[:], np.int64), due) else ""

        plan = state.repair_plan
        return plan if plan.reason else planned_repair(plan.time, reason_to_wait)

    def rows(self, state: SGLangRequest) -> int:
        """Return about how many rows the repair of a request takes; the same on all ranks."""
        recomputer = self.copies.recomputer
        return 0 if recomputer is None or not state.has_moved else recomputer.expected_rows(state.extent()[0])

    def is_too_much(self, state: SGLangRequest, running: Iterable[Any], num_rows: int) -> bool:
        """Whether a request is better admitted after the step that repairs those before it: answers stream beside them.

        Args:
            state: Of the request, which was not loaded yet.
            running: Requests that draw tokens, each an SGLang `Req`.
            num_rows: Rows of repairs that come before first tokens in this step.
        """
        rows = self.rows(state)
        ahead = num_rows + sum(map(self.rows, self.waiting.values())) if rows else 0
        return ahead > 0 and ahead + rows > self.most_rows and any(req not in self.waiting for req in running)

    def loaded(self, state: SGLangRequest, req: Any, slots: Tensor) -> None:  # noqa: ANN401
        """Compute the choice in what was loaded, before SGLang computes from `len(slots)` (int64) on, or have it wait."""
        if not state.repairs_after:
            self.copies.recompute(state, req, slots)
        elif self.copies.recomputer is not None and state.has_shifted:
            self.waiting[req] = state

    def due(self, reqs: Iterable[Any]) -> list[Any]:
        """Return those of `reqs`, whose next rows are those of tokens that were drawn, that are to be repaired first."""
        return [req for req in reqs if req in self.waiting] if self.waiting else []

    def run(self, req: Any, row: Tensor) -> None:  # noqa: ANN401
        """Repair a request that is due; `row` are its slots by position. One that was aborted since needs no repair."""
        state = self.waiting.pop(req)
        if req.to_finish is None:
            self.copies.repair(state, req, row[: state.prompt.num_tokens].long())

    def drop(self, req: Any) -> None:  # noqa: ANN401
        """A request ended, begins anew, or has K/V of other weights: it waits for no repair."""
        self.waiting.pop(req, None)
