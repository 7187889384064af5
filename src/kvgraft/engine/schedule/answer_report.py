"""The report of one answer's reuse, from its first prompt to its last token."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvgraft.engine.kv.report import prompt_report, repair_report
from kvgraft.types import RepairTime

if TYPE_CHECKING:
    from kvgraft.engine.kv.request_kv import RequestKV
    from kvgraft.engine.model.flops import ModelFlops
    from kvgraft.engine.schedule.drafts import DraftLog
    from kvgraft.graft.repair import RepairOutcome
    from kvgraft.graft.sparse_prefill import PrefillOutcome
    from kvgraft.graft.steps import GraftWork
    from kvgraft.types import GraftReport


class AnswerReport:
    """Takes down what has happened; what a request does next is never read from it.

    The report is that of the graft that the first token was drawn from; what comes later adds to it. Tokens of the answer
    count from 1.

    Attributes:
        value: None until a prompt is computed.
    """

    def __init__(self, flops: ModelFlops) -> None:
        self.value: GraftReport | None = None
        self._flops = flops

    def prefilled(self, kv: RequestKV, outcome: PrefillOutcome) -> None:
        """The prompt is computed for the first time; a policy's choice may be left to repair."""
        self.value = prompt_report(kv, outcome.work, self._flops, repair_report(kv, outcome))

    def forget(self) -> None:
        """Nothing was drawn from that graft: the request begins again."""
        self.value = None

    def waits(self, reason: str) -> None:
        """The first token is drawn after the repair, though the request asked for another time."""
        assert self.value is not None
        assert self.value.repair is not None
        self.value = replace(self.value, repair=replace(self.value.repair, time=RepairTime.BEFORE, reason=reason))

    def repair_ended(self, kv: RequestKV, outcome: RepairOutcome, token: int) -> None:
        """The policy's choice is computed, or everything because the policy failed; `token` is drawn next."""
        if outcome.is_exact:
            self._given_up(kv, outcome.work, token)
        else:
            self.repaired(kv, outcome.work, token)

    def repaired(self, kv: RequestKV, work: GraftWork, token: int) -> None:
        """`token` and those after it are drawn from what `work`, all of it, left."""
        assert self.value is not None
        repair = self.value.repair
        done = None if repair is None else replace(repair, from_token=token)
        report = prompt_report(kv, work, self._flops, done)
        # Less than the first token was drawn from, before a preemption, is not what the report is of.
        is_less = token > 1 and report.num_copied < self.value.num_copied
        self.value = replace(self.value, repair=done) if is_less else report

    def became_exact(self, token: int, *, is_approximate: bool) -> None:
        """`token` and those after it are drawn from K/V without copies of the request's own.

        That is a full prefill's unless it goes on from another turn's copies, and `is_approximate`.
        """
        assert self.value is not None
        repair = self.value.repair
        if repair is None or repair.exact_from_token is not None:
            return
        exact_from = None if is_approximate else token
        done = replace(repair, from_token=repair.from_token or token, exact_from_token=exact_from)
        self.value = replace(self.value, repair=done)

    def healed(self, num_tokens: int, flops: float) -> None:
        """So many tokens were computed again after the first token: no other count of the report has them."""
        assert self.value is not None
        repair = self.value.repair
        if repair is not None:
            repair = replace(repair, healed_tokens=repair.healed_tokens + num_tokens)
            self.value = replace(self.value, repair=repair, computed_flops=self.value.computed_flops + flops)

    def verified(self, log: DraftLog) -> None:
        """The prompt was computed again, exactly, after `log` had drafted over its copies."""
        assert self.value is not None
        self.value = log.healed(self.value, self._flops)

    def _given_up(self, kv: RequestKV, work: GraftWork, token: int) -> None:
        """The policy failed: `work` has computed everything, and nothing is repaired.

        Where the first token was drawn by then, the report stays that of its graft, and what came after counts as healed.
        """
        assert self.value is not None
        if token == 1:
            self.value = prompt_report(kv, work, self._flops, None)
            return
        total = prompt_report(kv, work, self._flops, None).computed_flops
        self.healed(kv.plan.num_tokens - kv.plan.prefix_len, total - self.value.computed_flops)
        self.became_exact(token, is_approximate=kv.lineage.is_approximate)
