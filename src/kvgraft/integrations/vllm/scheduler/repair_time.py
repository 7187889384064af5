"""When the choice of a request's policy is computed: with its second token, or before the first one and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvgraft.graft.select import (
    NoRecompute,
    Observable,
    PolicySteps,
    expected_rows,
    says_much_twice,
    selection_context,
)
from kvgraft.graft.steps import QUERY_ROWS
from kvgraft.reuse.repair_time import CONSTRAINED, ONE_TOKEN, REPEATS, RepairPlan, planned_repair
from kvgraft.types import RepairTime

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvgraft.graft.select import SelectionPolicy
    from kvgraft.integrations.vllm.scheduler.facts import EngineFacts
    from kvgraft.types import GraftPlan

_LOOKED_AT_TEXT = 4 * QUERY_ROWS
"""Tokens after the last span, at most, that workers compute in place of vLLM to look on."""


class RepairTimes:
    """Decides by the prompt, its plan and settings, never by load, so that no answer depends on what runs beside it."""

    def __init__(
        self, policy: SelectionPolicy, facts: EngineFacts, *, max_rows: int, below_margin: float = 0.0
    ) -> None:
        """Take the engine's policy, the rows of one of its steps, and the margin below which first tokens wait."""
        self._policy = policy
        self._below_margin = below_margin
        self._facts = facts
        self._max_rows = max_rows

    def of(
        self,
        plan: GraftPlan,
        token_ids: NDArray[np.integer],
        asked: RepairTime,
        *,
        max_tokens: int | None,
        num_generated: int,
        is_constrained: bool = False,
    ) -> RepairPlan | None:
        """Return when what the policy chooses of a plan is computed; None if it chooses from nothing.

        Args:
            plan: Of the prompt.
            token_ids: The prompt.
            asked: What the request or the settings ask for.
            max_tokens: Of the answer.
            num_generated: Tokens of the answer that are known: of a request that begins again some may be.
            is_constrained: Whether the first token decides the answer (`CONSTRAINED`).
        """
        if isinstance(self._policy, NoRecompute) or not plan.has_shifted:
            return None
        return planned_repair(
            asked,
            lambda: self._reason_to_wait(
                plan, token_ids, max_tokens=max_tokens, num_generated=num_generated, is_constrained=is_constrained
            ),
        )

    def end_of(self, plan: GraftPlan, repair: RepairPlan | None) -> int:
        """Return the first position that workers leave to vLLM: what follows the last span, or the last token alone."""
        return plan.num_tokens - 1 if self._looks_at_once(plan, repair) else plan.spans[-1].target_end

    def num_rows(self, plan: GraftPlan, token_ids: NDArray[np.integer], repair: RepairPlan | None) -> int:
        """Return how many positions workers compute before vLLM goes on, at most, as far as is known now."""
        end, looks_at_once = plan.spans[-1].target_end, self._looks_at_once(plan, repair)
        num_rows = len(plan.compute) if looks_at_once else int(np.searchsorted(plan.compute, end))
        if repair is None or repair.time is RepairTime.AFTER:
            may_wait = looks_at_once and self._below_margin > 0  # workers see by then how sure the first token is
            return num_rows + may_wait * self.num_rows_after(plan, token_ids, repair)
        if Observable.KEY_DEVIATION in self._policy.observes:
            return end - plan.prefix_len
        return num_rows + self._num_chosen(plan, token_ids) + self._looks * min(QUERY_ROWS, len(plan.compute))

    @property
    def _looks(self) -> bool:
        return Observable.QUERY_ATTENTION in self._policy.observes

    def _looks_at_once(self, plan: GraftPlan, repair: RepairPlan | None) -> bool:
        """Return whether workers compute the text after the last span, to look at what it attends to.

        A look of its own takes a third of a repair. A long text is left to vLLM where the look may come later: vLLM
        computes it beside other requests.
        """
        if repair is None or not self._looks:
            return False
        return repair.time is RepairTime.BEFORE or plan.num_tokens - plan.spans[-1].target_end <= _LOOKED_AT_TEXT

    def num_rows_after(self, plan: GraftPlan, token_ids: NDArray[np.integer], repair: RepairPlan | None) -> int:
        """Return how many positions workers compute in the step of the second token, as far as is known now."""
        return 0 if repair is None or repair.time is RepairTime.BEFORE else self._num_rows_after(plan, token_ids)

    def _reason_to_wait(
        self,
        plan: GraftPlan,
        token_ids: NDArray[np.integer],
        *,
        max_tokens: int | None,
        num_generated: int,
        is_constrained: bool,
    ) -> str:
        """Return why the first token waits for what the policy chooses, or an empty text."""
        if num_generated:
            # Those tokens' K/V would be computed over what is not repaired yet; the first token is out.
            return "vLLM began the request again after its first token"
        if max_tokens == 1:
            return ONE_TOKEN
        if self._facts.keeps_no_repair:
            return self._facts.keeps_no_repair
        if says_much_twice(token_ids, plan.shifted):
            return REPEATS
        rows = self._num_rows_after(plan, token_ids)
        if rows > self._max_rows:
            return f"it takes {rows} rows in one step, more than max_recompute_tokens_per_step={self._max_rows}"
        return CONSTRAINED if is_constrained else ""

    def _num_rows_after(self, plan: GraftPlan, token_ids: NDArray[np.integer]) -> int:
        """Return how many rows the repair takes in the step of the second token."""
        if Observable.KEY_DEVIATION in self._policy.observes:
            return plan.num_tokens - plan.settled_end
        num_looks = self._looks and not self._looks_at_once(plan, RepairPlan(RepairTime.AFTER))
        return self._num_chosen(plan, token_ids) + (1 + num_looks) * min(QUERY_ROWS, len(plan.compute))

    def _num_chosen(self, plan: GraftPlan, token_ids: NDArray[np.integer]) -> int:
        """Return how many reused tokens are chosen: an expected number where the policy looks first."""
        context = selection_context(plan, token_ids)
        if self._looks:
            return expected_rows(self._policy, context)
        return len(PolicySteps(self._policy, context).first().positions)
