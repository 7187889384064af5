"""The one report of a request, and its one form on the wire."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvgraft.types import Fidelity, GraftReport, Miss, MissReason

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvgraft.reuse.lineage import Lineage
    from kvgraft.types import SpanReport

REPORT_VERSION = 1
"""Of the fields of `report_as_dict`: raised when one changes its meaning or goes; new ones do not raise it."""


def request_report(
    lineage: Lineage,
    num_tokens: int,
    *,
    policy: str,
    corrected_tokens: int = 0,
    timings_ms: Mapping[str, float],
    miss: Miss | None,
    computed_flops: float = 0.0,
    full_flops: float = 0.0,
) -> GraftReport:
    """Sum up what was reused for a prompt of `num_tokens`.

    Args:
        lineage: Of the request, when its prompt is complete.
        num_tokens: Length of the prompt.
        policy: Name of the selection policy; only a graft has one.
        corrected_tokens: See `GraftReport`.
        timings_ms: Milliseconds by step.
        miss: Why nothing is grafted; not told where something is.
        computed_flops: See `GraftReport`.
        full_flops: See `GraftReport`.
    """
    shifted, substituted = (lineage.copied_tokens(kind) for kind in (Fidelity.SHIFTED, Fidelity.SUBSTITUTED))
    exact = min(lineage.given_len, num_tokens)
    is_grafted = bool(lineage.spans)
    return GraftReport(
        num_tokens=num_tokens,
        exact_tokens=exact,
        shifted_tokens=shifted,
        substituted_tokens=substituted,
        recomputed_tokens=lineage.recomputed,
        computed_tokens=num_tokens - exact - shifted - substituted,
        spans=lineage.spans,
        policy=policy if is_grafted else "none",
        corrected_tokens=corrected_tokens,
        timings_ms=dict(timings_ms),
        miss=None if is_grafted else miss or Miss(MissReason.NO_MATCH, "nothing was grafted"),
        computed_flops=computed_flops,
        full_flops=full_flops,
    )


def report_as_dict(report: GraftReport) -> dict[str, object]:
    """Return the report in types that JSON has; figures that are not finite become None."""
    return {
        "version": REPORT_VERSION,
        "num_tokens": int(report.num_tokens),
        "exact_tokens": int(report.exact_tokens),
        "shifted_tokens": int(report.shifted_tokens),
        "substituted_tokens": int(report.substituted_tokens),
        "recomputed_tokens": int(report.recomputed_tokens),
        "corrected_tokens": int(report.corrected_tokens),
        "computed_tokens": int(report.computed_tokens),
        "reused_tokens": int(report.reused_tokens),
        "num_donors": report.num_donors,
        "policy": str(report.policy),
        "miss": None if report.miss is None else {"reason": report.miss.reason.value, "detail": report.miss.detail},
        "spans": [_span_as_dict(span) for span in report.spans],
        "timings_ms": {step: _finite(value) for step, value in report.timings_ms.items()},
        "computed_flops": _finite(report.computed_flops),
        "full_flops": _finite(report.full_flops),
        "risk": _finite(report.risk),
    }


def _span_as_dict(span: SpanReport) -> dict[str, object]:
    return {
        "target_start": int(span.target_start),
        "length": int(span.length),
        "donor_id": int(span.donor_id),
        "donor_start": int(span.donor_start),
        "position_delta": int(span.position_delta),
        "fidelity": span.fidelity.value,
        "generation": int(span.generation),
    }


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)
