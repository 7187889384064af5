"""The report of a prompt is read off its lineage and changes nothing."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from kvgraft.engine.kv.report import prompt_report
from kvgraft.engine.model.flops import ModelFlops
from kvgraft.graft.steps import GraftWork
from kvgraft.reuse.decision import Decision
from kvgraft.reuse.lineage import Lineage, reused_span
from kvgraft.types import GraftPlan, Match


def test_a_report_that_is_made_twice_says_the_same():
    match, donor = Match(10, 0, 0, 40), SimpleNamespace(start_position=0, generation=0)
    plan = GraftPlan.over(60, 0, [match])
    lineage = Lineage(0)
    lineage.copy([reused_span(match, donor)])
    again = np.array([12, 13])
    computed = np.sort(np.concatenate([plan.compute, again]))
    work = GraftWork(computed, ((12, 2),), 0, computed, (), ())
    kv = SimpleNamespace(
        lineage=lineage,
        plan=plan,
        decision=Decision(plan, donors=(donor,), tiers=("device",)),
        timings_ms={},
    )
    flops = ModelFlops(1.0, 1.0, 2, 4)
    lineage.recompute(work.recomputed_runs)
    first, second = (prompt_report(kv, work, flops, None) for _ in range(2))
    assert (first.shifted_tokens, first.recomputed_tokens, first.recomputed_runs) == (38, 2, ((12, 2),))
    assert (second.shifted_tokens, second.recomputed_tokens, second.recomputed_runs) == (38, 2, ((12, 2),))
    lineage.check()
