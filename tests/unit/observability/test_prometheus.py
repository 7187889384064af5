from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvgraft import __version__
from kvgraft.observability import RequestRecord, StepRecord
from kvgraft.observability.prometheus import PrometheusRecorder
from kvgraft.types import (
    DonorId,
    Fidelity,
    GraftReport,
    Miss,
    MissReason,
    RepairReport,
    RepairTime,
    RiskStatement,
    RiskStatus,
    SpanReport,
    StoreCounts,
)

SPAN = SpanReport(0, 50, DonorId(1), 10, -10, Fidelity.SHIFTED, 0)


def samples(recorder):
    """Values by name and labels other than the model's."""
    return {
        (sample.name, *sorted(value for name, value in sample.labels.items() if name != "model_name")): sample.value
        for family in text_string_to_metric_families(recorder.exposition().decode())
        for sample in family.samples
    }


def make_report(**changes):
    values = {
        "num_tokens": 100,
        "exact_tokens": 20,
        "shifted_tokens": 50,
        "recomputed_tokens": 5,
        "computed_tokens": 30,
        "spans": (SPAN,),
        "timings_ms": {"lookup": 0.2, "graft": 3.0},
    }
    return GraftReport(**values | changes)


def make_record(**changes):
    values = {
        "request_id": "secret-id",
        "outcome": "stop",
        "prompt_tokens": 100,
        "output_tokens": 11,
        "report": make_report(),
        "queue_s": 0.1,
        "ttft_s": 0.5,
        "total_s": 1.5,
        "num_preemptions": 2,
    }
    return RequestRecord(**values | changes)


def test_continued_tokens_are_a_kind_and_make_their_request_approximate():
    recorder = PrometheusRecorder("m")
    counts = {"continued_tokens": 40, "shifted_tokens": 0, "recomputed_tokens": 0, "computed_tokens": 40}
    recorder.record_request(make_record(report=make_report(**counts, spans=())))
    found = samples(recorder)
    kinds = {"prefix": 20, "continued": 40, "segment": 0, "fresh": 40}
    assert {kind: found["kvgraft:prompt_tokens_total", "approx", kind] for kind in kinds} == kinds


def test_request_is_counted_by_kind_of_token():
    recorder = PrometheusRecorder("m")
    recorder.record_request(make_record())
    found = samples(recorder)
    kinds = {"prefix": 20, "segment": 50, "recomputed": 5, "fresh": 25}
    assert {kind: found["kvgraft:prompt_tokens_total", "approx", kind] for kind in kinds} == kinds
    assert found["kvgraft:generation_tokens_total",] == 11
    assert found["kvgraft:requests_total", "stop"] == 1
    assert found["kvgraft:num_preemptions_total",] == 2


def test_times_go_into_histograms():
    recorder = PrometheusRecorder("m")
    recorder.record_request(make_record())
    found = samples(recorder)
    assert found["kvgraft:time_to_first_token_seconds_sum",] == 0.5
    assert found["kvgraft:time_per_output_token_seconds_sum",] == pytest.approx(0.1)
    assert found["kvgraft:e2e_request_latency_seconds_sum",] == 1.5
    assert found["kvgraft:request_queue_time_seconds_sum",] == 0.1
    assert found["kvgraft:lookup_seconds_sum",] == pytest.approx(2e-4)
    assert found["kvgraft:graft_seconds_sum",] == pytest.approx(3e-3)
    assert found["kvgraft:time_to_first_token_seconds_bucket", "0.001"] == 0


def test_request_that_never_ran_leaves_times_out():
    recorder = PrometheusRecorder("m")
    recorder.record_request(make_record(outcome="abort", report=None, queue_s=None, ttft_s=None, output_tokens=0))
    found = samples(recorder)
    assert found["kvgraft:requests_total", "abort"] == 1
    assert found["kvgraft:time_to_first_token_seconds_count",] == 0
    assert found["kvgraft:request_queue_time_seconds_count",] == 0


def test_step_sets_the_state():
    recorder = PrometheusRecorder("m")
    recorder.record_step(StepRecord(0.01, 100, 3, 4, 5, 60, 10, 20, 10, 7, 700, 8, repair_rows=48, heal_rows=16))
    found = samples(recorder)
    holders = {"free": 60, "request": 10, "cached": 20, "donor": 10}
    assert {holder: found["kvgraft:kv_slots", holder] for holder in holders} == holders
    assert (found["kvgraft:num_requests_running",], found["kvgraft:num_requests_waiting",]) == (4, 5)
    rows = {"prefill": 100, "decode": 3, "repair": 48, "heal": 16}
    assert {phase: found["kvgraft:step_rows_total", phase] for phase in rows} == rows
    assert (found["kvgraft:donors",], found["kvgraft:donor_tokens",], found["kvgraft:donor_host_bytes",]) == (7, 700, 8)


def test_error_count_follows_the_engine_s():
    recorder = PrometheusRecorder("m")
    for count in (2, 2, 5):
        recorder.set_errors(count)
    assert samples(recorder)["kvgraft:graft_errors_total",] == 5


def test_proposals_follow_the_engine_s():
    recorder = PrometheusRecorder("m")
    for tokens in (100, 100, 250):
        recorder.set_proposals({"donors": 2, "tokens": tokens})
    text = recorder.exposition().decode()
    assert 'kvgraft:proposals_total{model_name="m",what="tokens"} 250.0' in text
    assert 'kvgraft:proposals_total{model_name="m",what="donors"} 2.0' in text


def test_calls_of_a_semantic_provider_follow_the_engine_s():
    recorder = PrometheusRecorder("m")
    for hits in (1, 1, 3):
        recorder.set_semantic_calls({"hit": hits, "miss": 2, "timeout": 0})
    text = recorder.exposition().decode()
    assert 'kvgraft:semantic_calls_total{model_name="m",outcome="hit"} 3.0' in text
    assert 'kvgraft:semantic_calls_total{model_name="m",outcome="miss"} 2.0' in text
    assert 'kvgraft:semantic_calls_total{model_name="m",outcome="timeout"} 0.0' in text


def test_miss_is_counted_by_reason():
    recorder = PrometheusRecorder("m")
    recorder.record_request(make_record(report=make_report(miss=Miss(MissReason.NO_ROOM, "full"))))
    assert samples(recorder)["kvgraft:graft_misses_total", "no_room"] == 1


def test_names_and_labels_are_ours_and_tell_no_ids():
    recorder = PrometheusRecorder("m")
    recorder.record_request(make_record())
    text = recorder.exposition().decode()
    assert "secret-id" not in text
    assert "_created" not in text
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    ours = [line for line in lines if not line.startswith("process_")]
    assert all(line.startswith(("kvgraft:", "kvgraft_build_info")) and 'model_name="m"' in line for line in ours)


def test_build_and_process_are_told():
    recorder = PrometheusRecorder("m")
    text = recorder.exposition().decode()
    assert f'version="{__version__}"' in next(line for line in text.splitlines() if line.startswith("kvgraft_build"))
    assert samples(recorder)["process_resident_memory_bytes",] > 0


def test_pools_are_told_with_their_limits():
    recorder = PrometheusRecorder("m")
    recorder.set_pools({"kv": (10, 20)})
    found = samples(recorder)
    assert (found["kvgraft:memory_used_bytes", "kv"], found["kvgraft:memory_limit_bytes", "kv"]) == (10, 20)
    assert 0 < found["kvgraft:memory_used_bytes", "process"] < found["kvgraft:memory_limit_bytes", "process"]


def recorder_of_everything():
    """Return a recorder each of whose metrics has a value."""
    recorder = PrometheusRecorder("m")
    recorder.record_request(make_record(report=make_report(repair=RepairReport(RepairTime.AFTER, from_token=2))))
    recorder.record_request(make_record(report=make_report(miss=Miss(MissReason.NO_ROOM, "full"))))
    recorder.record_step(StepRecord(0.01, 100, 3, 4, 5, 60, 10, 20, 10, 7, 700, 8))
    recorder.record_response("/v1/completions", 200)
    recorder.set_pools({"kv": (10, 20)})
    recorder.set_proposals({"donors": 2})
    recorder.set_semantic_calls({"hit": 1})
    recorder.set_healing(1, 2, 3, {"pressure": 1})
    recorder.set_stores([StoreCounts("file", reads={"hit": 1}, writes={"stored": 1})], 1)
    stated = RiskStatement(RiskStatus.CERTIFIED, epsilon=0.1, audits=3, notch="10 %")
    recorder.set_risk({"shifted": {"first": stated}})
    return recorder


def test_every_metric_has_a_value():
    lines = recorder_of_everything().exposition().decode().splitlines()
    shown = {line.split("{")[0].split(" ")[0] for line in lines if line[0] != "#"}
    told = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert not [name for name in told if not any(one.startswith(name) for one in shown)], "metrics without a value"


def test_promtool_finds_nothing_but_the_colons():
    """Which are explained in `observability/prometheus.py` and docs/running.md; on Debian promtool is in `prometheus`."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (apt install prometheus)")
    exposition = recorder_of_everything().exposition()
    done = subprocess.run([promtool, "check", "metrics"], input=exposition, capture_output=True, check=False)
    complaints = (done.stdout + done.stderr).decode().splitlines()
    assert not [
        line for line in complaints if not re.fullmatch(r"kvgraft:\w+ metric names should not contain ':'", line)
    ]
    assert complaints, "promtool has read nothing"
