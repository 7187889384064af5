"""The report of a verified answer, whose graft was for drafts alone."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvgraft.types import RiskStatement

if TYPE_CHECKING:
    from kvgraft.types import GraftReport, HealingReport

NOT_STATED_OF_VERIFIED = RiskStatement(reason="the answer is a full prefill's: every token was verified")
"""Risk statement of a verified answer."""


def verified_report(report: GraftReport, healing: HealingReport, flops: float) -> GraftReport:
    """Return the report of a request with a graft for drafts alone.

    Args:
        report: Of the graft.
        healing: How its K/V became exact.
        flops: Operations that computing it again took.
    """
    return replace(
        report,
        continued_tokens=0,
        shifted_tokens=0,
        recomputed_tokens=0,
        recomputed_runs=(),
        corrected_tokens=0,
        computed_tokens=report.num_tokens - report.exact_tokens,
        spans=(),
        policy="none",
        computed_flops=report.computed_flops + flops,
        risk=NOT_STATED_OF_VERIFIED,
        healing=healing,
        repair=None,
    )
