"""Reuse in a few numbers, for clients and proxies that know nothing of `kvgraft`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvgraft.engine.requests.request import RequestOutput

REPORT_HEADER = "x-kvgraft-report"


def reuse_summary(outputs: Sequence[RequestOutput]) -> dict[str, object]:
    """Return how many prompt tokens were reused, by class, and computed, and the first reason of a miss or None."""
    reports = [output.report for output in outputs]
    misses = (report.miss.reason.value for report in reports if report.miss is not None)
    return {
        "reused_tokens": sum(int(report.reused_tokens) for report in reports),
        "exact_tokens": sum(int(report.exact_tokens) for report in reports),
        "continued_tokens": sum(int(report.continued_tokens) for report in reports),
        "shifted_tokens": sum(int(report.shifted_tokens) for report in reports),
        "substituted_tokens": sum(int(report.substituted_tokens) for report in reports),
        "computed_tokens": sum(int(report.computed_tokens) for report in reports),
        "miss": next(misses, None),
    }


def report_header(summary: Mapping[str, object]) -> dict[str, str]:
    """Return the summary as a header: `reused=12, exact=12, ..., miss=no_donors`; what is None is left out."""
    parts = (f"{name.removesuffix('_tokens')}={value}" for name, value in summary.items() if value is not None)
    return {REPORT_HEADER: ", ".join(parts)}
