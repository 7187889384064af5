"""Records of made-up requests."""

from __future__ import annotations

from kvgraft.observability import RequestRecord, RequestTimes, StepRecord
from kvgraft.types import CONTINUATION, DonorId, Fidelity, GraftReport, Miss, MissReason, SpanReport

SPAN = SpanReport(10, 50, DonorId(1), 0, 10, Fidelity.SHIFTED, 0, "device")
GOES_ON = SpanReport(10, 50, CONTINUATION, 10, 0, Fidelity.CONTINUED, 1, "device")


def make_times(**changes):
    values = {
        "arrival": 100.0,
        "begun": 101.0,
        "lookup": 101.0,
        "graft": 102.0,
        "prefill": 103.0,
        "first_token": 105.0,
        "ended": 109.0,
    }
    return RequestTimes(**values | changes)


def make_report(**changes):
    values = {
        "num_tokens": 100,
        "exact_tokens": 10,
        "shifted_tokens": 45,
        "recomputed_tokens": 5,
        "computed_tokens": 45,
        "spans": (SPAN,),
        "policy": "query_seam",
        "timings_ms": {"lookup": 900.0, "graft": 990.0},
    }
    return GraftReport(**values | changes)


def make_continued_report(**changes):
    """Report a prompt that goes on from an earlier one and copies nothing."""
    miss = Miss(MissReason.NO_MATCH, "")
    counts = {"continued_tokens": 50, "shifted_tokens": 0, "recomputed_tokens": 0, "computed_tokens": 40}
    return make_report(**counts | {"spans": (GOES_ON,), "policy": "none", "miss": miss} | changes)


def make_record(request_id="answer-0", **changes):
    values = {
        "request_id": request_id,
        "outcome": "stop",
        "prompt_tokens": 100,
        "output_tokens": 4,
        "report": make_report(),
        "queue_s": 1.0,
        "ttft_s": 5.0,
        "total_s": 9.0,
        "num_preemptions": 0,
        "times": make_times(),
    }
    return RequestRecord(**values | changes)


def make_step(**changes):
    values = {
        "seconds": 0.5,
        "prefill_rows": 45,
        "decode_rows": 0,
        "num_running": 1,
        "num_waiting": 0,
        "slots_free": 10,
        "slots_request": 100,
        "slots_cached": 0,
        "slots_donor": 0,
        "num_donors": 0,
        "donor_tokens": 0,
        "host_bytes": 0,
        "started": 103.0,
    }
    return StepRecord(**values | changes)
