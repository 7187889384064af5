from __future__ import annotations

import pytest
from tests.unit.observability.records import make_continued_report, make_record, make_report, make_times

from kvgraft.observability.request_stages import Stage, stages_of
from kvgraft.types import HealingReport


def names(record):
    return [stage.name for stage in stages_of(record)]


def test_stages_follow_one_another_from_arrival_to_end():
    assert stages_of(make_record()) == [
        Stage("queue", 100.0, 101.0),
        Stage("lookup", 101.0, 102.0),
        Stage("graft", 102.0, 103.0),
        Stage("prefill", 103.0, 105.0),
        Stage("decode", 105.0, 109.0),
    ]


def test_request_without_a_graft_has_no_such_stage():
    assert names(make_record(report=make_report(spans=()))) == ["queue", "lookup", "prefill", "decode"]
    assert names(make_record(report=make_continued_report())) == ["queue", "lookup", "prefill", "decode"]


def test_read_that_came_too_late_is_a_graft_stage():
    report = make_report(spans=(), timings_ms={"lookup": 1.0, "graft": 0.1, "read": 900.0})
    assert "graft" in names(make_record(report=report))


def test_verified_answer_keeps_the_graft_stage_of_its_drafts():
    assert "graft" in names(make_record(report=make_report(spans=(), healing=HealingReport())))


def test_time_that_a_preemption_cost_is_told():
    record = make_record(times=make_times(begun=100.5), num_preemptions=1)
    assert stages_of(record)[:3] == [
        Stage("queue", 100.0, 100.5),
        Stage("preempted", 100.5, 101.0),
        Stage("lookup", 101.0, 102.0),
    ]


@pytest.mark.parametrize(
    ("missing", "left"),
    [
        (("first_token",), ["queue", "lookup", "graft", "prefill"]),
        (("first_token", "prefill", "graft", "lookup", "begun"), ["queue"]),
    ],
)
def test_request_that_ends_early_ends_its_last_stage(missing, left):
    stages = stages_of(make_record(times=make_times(**dict.fromkeys(missing))))
    assert [stage.name for stage in stages] == left
    assert stages[-1].end == 109.0


def test_stages_never_overlap_nor_leave_the_request():
    stages = stages_of(make_record(times=make_times(graft=100.5, prefill=200.0, first_token=200.5)))
    moments = [moment for stage in stages for moment in (stage.start, stage.end)]
    assert moments == sorted(moments)
    assert moments[-1] == 109.0


def test_record_without_times_has_no_stages():
    assert stages_of(make_record(times=None)) == []
