"""When the tokens that a policy chooses are computed: before SGLang computes behind them, or with the second token.

SGLang computes a prompt, sends the first token and hands the row of that token to the model in a later step. Before that step
the choice of the policy is computed into the request's own slots. The step is fixed by the request, never by load. A request
that was retracted goes on with its answer from repaired copies, as if it had not been.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from kvgraft.graft.first_token import reason_if_unsure
from kvgraft.graft.select import says_much_twice
from kvgraft.integrations.sglang.requests.guard import guarded
from kvgraft.reuse.repair_time import CONSTRAINED, ONE_TOKEN, REPEATS, RepairPlan, planned_repair
from kvgraft.types import Fidelity, RepairTime

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

    from torch import Tensor

    from kvgraft.integrations.sglang.requests.books import Books
    from kvgraft.integrations.sglang.requests.passes import PolicyPasses
    from kvgraft.integrations.sglang.requests.request import SGLangRequest


BEGUN = "its answer was begun before a retraction"
"""Reason to wait of a request whose next token is not its first one: all but that are drawn from what was repaired."""


MOST_ROWS = 2048
"""Rows that repairs take in one step, of all requests together, while other answers stream: as many as one pass takes."""


@dataclass(eq=False)
class Repairs:
    """Says when a policy's choice is computed, and has it computed. Not thread-safe. A `req` is SGLang's `Req`.

    Attributes:
        passes: Compute it.
        refusal: Why this server makes no passes of its own after the first token; empty if it does.
        below_margin: A first token whose probability exceeds the next one's by less waits for the repair; 0 for none.
        most_rows: See `MOST_ROWS`. A request whose repair alone takes more is repaired in a step of its own.
        waiting: Requests that are not repaired yet; the same on all ranks, which ask each other only where there are some.
    """

    books: Books
    passes: PolicyPasses
    refusal: str = ""
    below_margin: float = 0.0
    most_rows: int = MOST_ROWS
    waiting: WeakKeyDictionary[Any, SGLangRequest] = field(default_factory=WeakKeyDictionary, init=False)

    # When

    def planned(
        self, asked: RepairTime, num_tokens_left: int, num_drawn: int = 0, *, is_constrained: bool = False
    ) -> RepairPlan:
        """Return when a request that `asked` for a time is repaired.

        Args:
            asked: By the request or the settings.
            num_tokens_left: Tokens that it may still generate.
            num_drawn: Tokens of its answer that were drawn before a retraction.
            is_constrained: Whether the first token decides the answer (`CONSTRAINED`).
        """

        def reason_to_wait() -> str:
            reasons = {ONE_TOKEN: num_tokens_left <= 1, BEGUN: num_drawn > 0, CONSTRAINED: is_constrained}
            return self.refusal or next((reason for reason, holds in reasons.items() if holds), "")

        return planned_repair(asked, reason_to_wait)

    def planned_for(self, state: SGLangRequest, tokens: array[int]) -> RepairPlan:
        """Return when a decided request is repaired: what it copies may be a reason to wait. The same on all ranks."""

        def reason_to_wait() -> str:
            due = [(span.start, span.length) for span in state.due if span.fidelity is Fidelity.SHIFTED]
            if self.passes.recomputer is None or not due:
                return ""
            return REPEATS if says_much_twice(np.frombuffer(tokens[:], np.int64), due) else ""

        plan = state.repair_plan
        return plan if plan.reason else planned_repair(plan.time, reason_to_wait)

    def rows(self, state: SGLangRequest) -> int:
        """Return about how many rows the repair of a request takes; the same on all ranks."""
        recomputer = self.passes.recomputer
        return 0 if recomputer is None or not state.has_moved else recomputer.expected_rows(state.extent()[0])

    @guarded("repair", lambda: 0, is_read=True)
    def rows_now(self, req: Any) -> int:  # noqa: ANN401
        """Return about how many rows are repaired in the step that admits the request."""
        state = self.books.requests.get(req)
        return 0 if state is None or state.repairs_after else self.rows(state)

    @guarded("repair", lambda: False, is_read=True)
    def is_too_much(self, req: Any, running: Sequence[Any], num_rows: int) -> bool:  # noqa: ANN401
        """Whether a request is better admitted after the step that repairs those before it: answers stream beside them.

        Args:
            req: It was not loaded yet.
            running: Requests that draw tokens.
            num_rows: Rows of repairs that come before first tokens in this step.
        """
        state = self.books.requests.get(req)
        rows = 0 if state is None else self.rows(state)
        ahead = num_rows + sum(map(self.rows, self.waiting.values())) if rows else 0
        return ahead > 0 and ahead + rows > self.most_rows and any(each not in self.waiting for each in running)

    # And then

    def recompute(self, req: Any, slots: Tensor) -> None:  # noqa: ANN401
        """Compute the choice in what was loaded, before SGLang computes from `len(slots)` (int64) on, or have it wait.

        Nothing is computed by these weights over K/V of others.
        """
        state = self.books.requests.get(req)
        if state is None or self.books.is_stale:
            return
        try:
            self.books.ranks.together(partial(self._loaded, state, req, slots))
        except Exception as error:  # noqa: BLE001 - raised again where others cannot know
            self._leave_as_copied("recompute", req, error)

    def _loaded(self, state: SGLangRequest, req: Any, slots: Tensor) -> None:  # noqa: ANN401
        if not state.repairs_after:
            self.passes.before(state, req, slots)
        elif self.passes.recomputer is not None and state.has_shifted:
            self.waiting[req] = state

    def before_first(self, req: Any, row: Tensor, num_tokens: int, logits: Tensor) -> None:  # noqa: ANN401
        """Repair a request whose first token is about to be drawn and is not sure; all ranks must ask alike.

        Nothing is computed by these weights over K/V of others.

        Args:
            req: One that waits for its repair; ignored otherwise.
            row: Its slots by position.
            num_tokens: Of its prompt that are computed.
            logits: (vocab_size,), after the last of them; those over the repaired K/V take their place.
        """
        state = self.waiting.get(req)
        if not self.below_margin or state is None or self.books.is_stale or num_tokens < state.prompt.num_tokens:
            return
        ranks = self.books.ranks
        try:
            reason = ranks.together(partial(reason_if_unsure, logits, self.below_margin))
            if reason and req.to_finish is None:
                ranks.together(partial(self._repair_first, state, req, row, logits, reason))
        except Exception as error:  # noqa: BLE001 - raised again where others cannot know
            self._leave_as_copied("repair", req, error)

    def _repair_first(self, state: SGLangRequest, req: Any, row: Tensor, logits: Tensor, reason: str) -> None:  # noqa: ANN401
        state.planned(RepairPlan(RepairTime.BEFORE, reason))
        self._repair(req, row)
        found = self.passes.logits(state, req, row[: state.prompt.num_tokens].long())
        with torch.inference_mode():
            logits.copy_(found)

    def due(self, reqs: Sequence[Any]) -> list[Any]:
        """Return those of `reqs`, whose next rows are those of tokens that were drawn, that are to be repaired first.

        Where that fails they are not repaired: in a later step it would be for another token than the reports say.
        """
        try:
            return self.books.ranks.together(partial(self._due, reqs)) if self.waiting else []
        except Exception as error:  # noqa: BLE001 - raised again where others cannot know
            self.books.failed("repair", "-", error)
            for req in reqs:
                self.drop(req)
            return []

    def _due(self, reqs: Sequence[Any]) -> list[Any]:
        return [req for req in reqs if req in self.waiting]

    def repair(self, req: Any, row: Tensor) -> None:  # noqa: ANN401
        """Repair a request that is due; `row` are its slots by position. One that was aborted since needs no repair.

        Nothing is computed by these weights over K/V of others.
        """
        if self.books.is_stale:
            self.drop(req)
            return
        try:
            self.books.ranks.together(partial(self._repair, req, row))
        except Exception as error:  # noqa: BLE001 - raised again where others cannot know
            self._leave_as_copied("repair", req, error)

    def _repair(self, req: Any, row: Tensor) -> None:  # noqa: ANN401
        state = self.waiting.pop(req)
        if req.to_finish is None:
            self.passes.after(state, req, row[: state.prompt.num_tokens].long())

    def _leave_as_copied(self, stage: str, req: Any, error: Exception) -> None:  # noqa: ANN401
        """What was copied stays as approximate as it was, and waits for nothing."""
        self.books.failed(stage, req.rid, error)
        self.drop(req)
        state = self.books.requests.get(req)
        if state is not None:
            state.left_as_copied()

    def drop(self, req: Any) -> None:  # noqa: ANN401
        """A request ended, begins anew, or has K/V of other weights: it waits for no repair."""
        self.waiting.pop(req, None)
