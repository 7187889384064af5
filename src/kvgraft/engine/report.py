"""Say what was reused for a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvgraft.types import Fidelity, GraftReport, SpanReport

if TYPE_CHECKING:
    from kvgraft.engine.flops import ModelFlops
    from kvgraft.engine.request import RequestCache
    from kvgraft.graft.sparse_prefill import PrefillOutcome


def graft_report(cache: RequestCache, outcome: PrefillOutcome, flops: ModelFlops) -> GraftReport:
    """Say what was reused for a request whose prompt is computed."""
    plan = cache.plan
    recomputed = outcome.recomputed(plan)
    spans = tuple(
        SpanReport(
            target_start=match.target_start,
            length=match.length,
            donor_id=match.donor_id,
            donor_start=match.donor_start,
            position_delta=match.target_start - donor.start_position - match.donor_start,
            fidelity=Fidelity.SHIFTED,
            generation=donor.generation,
        )
        for match, donor in zip(plan.spans, cache.donors, strict=True)
    )
    return GraftReport(
        num_tokens=plan.num_tokens,
        exact_tokens=plan.exact_len,
        shifted_tokens=plan.reused_len - recomputed,
        recomputed_tokens=recomputed,
        computed_tokens=len(outcome.computed),
        spans=spans,
        policy=cache.request.policy.name if spans else "none",
        timings_ms=dict(cache.timings_ms),
        miss=cache.miss,
        computed_flops=flops.of_positions(outcome.computed),
        full_flops=flops.of_positions(np.arange(plan.num_tokens)),
    )
