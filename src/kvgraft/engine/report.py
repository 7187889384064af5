"""Say what was reused for a prompt that is computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvgraft.reuse.report import request_report

if TYPE_CHECKING:
    from kvgraft.engine.flops import ModelFlops
    from kvgraft.engine.request_kv import RequestKV
    from kvgraft.graft.sparse_prefill import PrefillOutcome
    from kvgraft.types import GraftReport


def prompt_report(kv: RequestKV, outcome: PrefillOutcome, flops: ModelFlops) -> GraftReport:
    """Note in the lineage what the policy had computed again, and sum up."""
    besides = sum(flops.of_look(positions, layer) for positions, layer in outcome.looks)
    if kv.request.correction is not None:
        besides += flops.of_correction(kv.request.correction, outcome.drift_work)
    kv.lineage.recompute(outcome.recomputed_runs(kv.plan))
    return request_report(
        kv.lineage,
        kv.plan.num_tokens,
        policy=kv.request.policy.name,
        corrected_tokens=outcome.num_corrected,
        timings_ms=kv.timings_ms,
        miss=kv.miss,
        computed_flops=flops.of_positions(outcome.rows) + besides,
        full_flops=flops.of_positions(np.arange(kv.plan.num_tokens)),
        risk=kv.risk,
        substitution=kv.substitution,
    )
