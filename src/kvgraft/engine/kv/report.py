"""The report of a prompt that is computed, and of its repair."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.graft.select import says_much_twice
from kvgraft.reuse.repair_time import CONSTRAINED, ONE_TOKEN, REPEATS
from kvgraft.reuse.report import request_report
from kvgraft.types import RepairReport, RepairTime

if TYPE_CHECKING:
    from kvgraft.engine.kv.request_kv import RequestKV
    from kvgraft.engine.model.flops import ModelFlops
    from kvgraft.graft.drift import DriftCorrection
    from kvgraft.graft.sparse_prefill import PrefillOutcome
    from kvgraft.graft.steps import GraftWork
    from kvgraft.types import GraftReport


logger = logging.getLogger(__name__)


def prompt_report(kv: RequestKV, work: GraftWork, flops: ModelFlops, repair: RepairReport | None) -> GraftReport:
    """Sum up an attempt whose prompt is computed by `work`; again when more of it is."""
    decision = kv.decision
    besides = sum(flops.of_look(positions, layer) for positions, layer in work.looks)
    if decision.correction is not None:
        besides += _correction_flops(decision.correction, work, flops)
    return request_report(
        kv.lineage,
        kv.plan.num_tokens,
        policy="none" if decision.policy is None else decision.policy.name,
        corrected_tokens=work.num_corrected,
        timings_ms=kv.timings_ms,
        miss=decision.miss,
        computed_flops=flops.of_positions(work.rows) + besides,
        full_flops=flops.of_positions(np.arange(kv.plan.num_tokens)),
        risk=decision.risk,
        substitution=decision.substitution,
        repair=repair,
    )


def _correction_flops(correction: DriftCorrection, work: GraftWork, flops: ModelFlops) -> float:
    """Return what corrections cost; nothing where the estimator, which may be foreign code, cannot say it."""
    try:
        return flops.of_correction(correction, work.drift_work)
    except Exception:
        logger.exception("the cost of drift correction is unknown and not counted")
        return 0.0


def repair_report(kv: RequestKV, outcome: PrefillOutcome) -> RepairReport | None:
    """Return the facts of a repair once the first token can be drawn; None where nothing is repaired."""
    request = kv.request
    if outcome.repair is not None or kv.is_healing:
        return RepairReport(RepairTime.AFTER, rows_per_step=request.repair.rows_per_step)
    if not outcome.work.recomputed_runs:
        return None
    return RepairReport(RepairTime.BEFORE, _reason_to_wait(kv), from_token=1)


def _reason_to_wait(kv: RequestKV) -> str:
    """Return why the first token waited for the repair though the request asked for another time; empty if it did not."""
    request = kv.request
    if request.repair.time is RepairTime.BEFORE:
        return ""
    if request.sampling.max_new_tokens == 1:
        return ONE_TOKEN
    if not kv.decision.waits:
        return ""
    if request.is_constrained:
        return CONSTRAINED
    if says_much_twice(request.token_ids, kv.plan.shifted):
        return REPEATS
    return "the risk that is held leaves no first token unrepaired"
