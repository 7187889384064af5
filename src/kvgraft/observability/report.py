"""A `GraftReport` as plain JSON values."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvgraft.types import GraftReport, SpanReport


def report_as_dict(report: GraftReport) -> dict[str, object]:
    """Return the report in types that JSON has; figures that are not finite become None."""
    return {
        "num_tokens": int(report.num_tokens),
        "exact_tokens": int(report.exact_tokens),
        "shifted_tokens": int(report.shifted_tokens),
        "substituted_tokens": int(report.substituted_tokens),
        "recomputed_tokens": int(report.recomputed_tokens),
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


def token_kinds(report: GraftReport) -> dict[str, int]:
    """Prompt tokens by how they came about, under the names of the metrics' label `kind`."""
    kinds = {
        "prefix": report.exact_tokens,
        "segment": report.shifted_tokens + report.substituted_tokens,
        "recomputed": report.recomputed_tokens,
        "fresh": report.computed_tokens - report.recomputed_tokens,
    }
    return {kind: max(0, count) for kind, count in kinds.items()}


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
