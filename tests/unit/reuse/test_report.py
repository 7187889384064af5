from __future__ import annotations

import json
import math

import numpy as np
import pytest

from kvgraft.reuse.report import report_as_dict, worst_report
from kvgraft.types import DonorId, Fidelity, GraftReport, HealingReport, Miss, MissReason, SpanReport


def test_report_is_plain_json():
    span = SpanReport(np.int64(5), np.int64(7), DonorId(3), np.int64(1), np.int64(4), Fidelity.SHIFTED, 1)
    report = GraftReport(
        np.int64(20),
        exact_tokens=np.int64(2),
        shifted_tokens=np.int64(7),
        spans=(span,),
        timings_ms={"lookup": np.float64(0.5), "graft": math.nan},
        miss=Miss(MissReason.NO_ROOM, "full"),
        full_flops=math.inf,
    )
    told = json.loads(json.dumps(report_as_dict(report), allow_nan=False))
    assert (told["num_tokens"], told["reused_tokens"], told["num_donors"]) == (20, 9, 1)
    assert told["miss"] == {"reason": "no_room", "detail": "full"}
    assert told["timings_ms"] == {"lookup": 0.5, "graft": None}
    assert told["full_flops"] is None
    assert told["spans"] == [
        {
            "target_start": 5,
            "length": 7,
            "donor_id": 3,
            "donor_start": 1,
            "position_delta": 4,
            "fidelity": "shifted",
            "generation": 1,
            "tier": None,
            "documents": [],
        }
    ]


def test_every_field_of_the_report_is_told():
    report = GraftReport(1)
    assert set(GraftReport.__dataclass_fields__) <= set(report_as_dict(report))


def test_healing_is_plain_json():
    span = SpanReport(np.int64(5), np.int64(7), DonorId(3), np.int64(1), np.int64(4), Fidelity.SHIFTED, 1)
    healing = HealingReport((span,), np.int64(15), np.int64(0), 0, 0.0, np.float64(0.5), math.inf)
    told = json.loads(json.dumps(report_as_dict(GraftReport(20, healing=healing)), allow_nan=False))["healing"]
    assert [span["donor_id"] for span in told.pop("spans")] == [3]
    assert told == {
        "healed_tokens": 15,
        "drafted_tokens": 0,
        "retracted_tokens": 0,
        "first_provisional_ms": None,
        "first_verified_ms": 500.0,
        "healed_at_ms": None,
    }


def attempt(exact, shifted=0, substituted=0, policy="first_k"):
    return GraftReport(100, exact, shifted_tokens=shifted, substituted_tokens=substituted, policy=policy)


@pytest.mark.parametrize(
    ("attempts", "speaks"),
    [
        ([attempt(0, 40), attempt(90)], 0),
        ([attempt(90), attempt(0, 40)], 1),
        ([attempt(0, 10, 40), attempt(0, 30)], 0),
        ([attempt(50), attempt(10)], 1),
        ([attempt(10), attempt(10, policy="none")], 1),
    ],
)
def test_of_all_attempts_the_worst_one_speaks(attempts, speaks):
    assert worst_report(iter(attempts)) is attempts[speaks]


def test_no_more_tokens_are_called_exact_than_every_attempt_had_exact():
    """Preempted behind 48 exact tokens, begun again with none: its first tokens rest on approximate K/V."""
    first = GraftReport(100, 48, shifted_tokens=40, computed_tokens=12, policy="first_k")
    again = GraftReport(100, 0, shifted_tokens=30, computed_tokens=70, policy="first_k")
    for attempts in ([first, again], [again, first]):
        report = worst_report(attempts)
        assert (report.exact_tokens, report.shifted_tokens, report.computed_tokens) == (0, 40, 60)
