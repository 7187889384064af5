from __future__ import annotations

import pytest

from kvgraft.reuse.metrics import METRICS, MetricKind, samples, token_kinds, token_outcome
from kvgraft.types import (
    DonorId,
    Fidelity,
    GraftReport,
    HealingReport,
    Miss,
    MissReason,
    RepairReport,
    RepairTime,
    SpanReport,
)

SPAN = SpanReport(0, 50, DonorId(1), 10, -10, Fidelity.SHIFTED, 0)


def make_report(**changes):
    values = {
        "num_tokens": 100,
        "exact_tokens": 20,
        "shifted_tokens": 50,
        "recomputed_tokens": 5,
        "computed_tokens": 30,
        "spans": (SPAN,),
        "timings_ms": {"lookup": 0.2, "graft": 3.0, "recompute": 7.0, "another": 1.0},
    }
    return GraftReport(**values | changes)


def values_of(report):
    return {(sample.metric.name, *sample.labels): sample.value for sample in samples(report)}


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({}, "approx"),
        ({"shifted_tokens": 0, "substituted_tokens": 1}, "approx"),
        ({"shifted_tokens": 0, "continued_tokens": 1, "miss": Miss(MissReason.NOT_WORTH_IT)}, "approx"),
        ({"shifted_tokens": 0, "miss": Miss(MissReason.ERROR)}, "fallback"),
        ({"shifted_tokens": 0, "miss": Miss(MissReason.NOT_WORTH_IT)}, "rejected"),
        ({"shifted_tokens": 0, "miss": Miss(MissReason.NO_DONORS)}, "exact"),
        ({"shifted_tokens": 0}, "exact"),
        ({"shifted_tokens": 0, "repair": RepairReport(RepairTime.BEFORE, from_token=1)}, "exact"),
        ({"shifted_tokens": 0, "repair": RepairReport(RepairTime.AFTER, from_token=2)}, "approx"),
        ({"shifted_tokens": 0, "repair": RepairReport(RepairTime.AFTER, from_token=2, exact_from_token=2)}, "approx"),
    ],
)
def test_outcome_says_how_tokens_relate_to_full_prefill(changes, outcome):
    assert token_outcome(make_report(**changes)) == outcome


def test_graft_counts_tokens_by_kind_and_its_steps():
    found = values_of(make_report())
    assert found == {
        ("prompt_tokens", "prefix", "approx"): 20,
        ("prompt_tokens", "continued", "approx"): 0,
        ("prompt_tokens", "segment", "approx"): 50,
        ("prompt_tokens", "substituted", "approx"): 0,
        ("prompt_tokens", "recomputed", "approx"): 5,
        ("prompt_tokens", "fresh", "approx"): 25,
        ("grafted_requests",): 1,
        ("lookup_seconds",): pytest.approx(2e-4),
        ("graft_seconds",): pytest.approx(3e-3),
        ("recompute_seconds",): pytest.approx(7e-3),
    }


@pytest.mark.parametrize(
    ("repair", "labels"),
    [
        (RepairReport(RepairTime.AFTER, from_token=2), ("after", "repaired")),
        (RepairReport(RepairTime.AFTER), ("after", "none")),
        (RepairReport(RepairTime.AFTER, from_token=2, rows_per_step=16, exact_from_token=40), ("after", "exact")),
        (RepairReport(RepairTime.BEFORE, "one token was asked for", from_token=1), ("before", "repaired")),
    ],
)
def test_a_graft_counts_when_it_was_repaired(repair, labels):
    found = values_of(make_report(repair=repair))
    assert found["repairs", *labels] == 1
    assert [name for name in found if name[0] == "repairs"] == [("repairs", *labels)]


def test_miss_counts_its_reason_and_no_graft():
    found = values_of(make_report(spans=(), shifted_tokens=0, miss=Miss(MissReason.DEADLINE, "slow")))
    assert found["graft_misses", "deadline"] == 1
    assert ("grafted_requests",) not in found
    assert ("graft_seconds",) not in found
    assert found["prompt_tokens", "prefix", "rejected"] == 20


HEALING = HealingReport((SPAN,), 75, 6, 2, 0.03, 0.4, 0.39)


def test_healed_request_counts_its_drafts_and_neither_graft_nor_miss():
    """Nothing approximate is left of it, so it is none of the grafted requests; and it did not miss."""
    healed = {"spans": (), "shifted_tokens": 0, "recomputed_tokens": 0, "computed_tokens": 80}
    for miss in (None, Miss(MissReason.NO_MATCH)):
        found = values_of(make_report(**healed, miss=miss, healing=HEALING))
        assert (found["verified_requests",], found["drafted_tokens",], found["retracted_tokens",]) == (1, 6, 2)
        assert found["time_to_first_provisional_token_seconds",] == 0.03
        assert found["graft_seconds",] == pytest.approx(3e-3)
        assert found["prompt_tokens", "fresh", "exact"] == 80
        assert not {name for name, *_ in found} & {"grafted_requests", "graft_misses"}


def test_without_drafts_there_is_no_time_of_a_first_one():
    found = values_of(make_report(healing=HealingReport((SPAN,), 75)))
    assert found["drafted_tokens",] == 0
    assert ("time_to_first_provisional_token_seconds",) not in found


def test_kinds_sum_up_to_the_prompt():
    report = make_report()
    assert sum(token_kinds(report).values()) == report.num_tokens


def test_samples_have_the_labels_of_their_metrics():
    for report in (make_report(), make_report(healing=HEALING), make_report(spans=(), miss=Miss(MissReason.ERROR))):
        for sample in samples(report):
            assert sample.metric in METRICS
            assert len(sample.labels) == len(sample.metric.labels)
            assert bool(sample.metric.buckets) == (sample.metric.kind is MetricKind.HISTOGRAM)


def test_names_are_the_field_s():
    assert len({metric.full_name for metric in METRICS}) == len(METRICS)
    assert all(metric.full_name == f"kvgraft:{metric.name}" for metric in METRICS)
