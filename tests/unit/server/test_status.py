from __future__ import annotations

import asyncio

import pytest

from kvgraft.errors import CorruptCacheError
from kvgraft.memory import SlotUsage
from kvgraft.server import health
from kvgraft.server.context import model_id
from kvgraft.types import RiskStatement, RiskStatus


def test_index_lists_what_is_there(server):
    endpoints = server.get("/").json["endpoints"]
    for endpoint in endpoints:
        method, path = endpoint.split()
        reply = server.call(method, path)
        assert reply.status in {200, 415} or reply.error["code"] == "session_not_found"


def test_models_lists_the_one_model(server):
    (model,) = server.get("/v1/models").json["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("fake", "model", 2_000)
    assert server.get("/v1/models/fake").json == model


def test_model_names_may_have_slashes(make_server):
    assert make_server(served_model_name="org/name").get("/v1/models/org/name").json["id"] == "org/name"


def test_directory_is_named_by_its_last_part(tmp_path):
    assert model_id(str(tmp_path)) == tmp_path.name
    assert model_id("org/name") == "org/name"


def test_file_is_named_without_its_place_and_suffix(tmp_path):
    (tmp_path / "Model-Q4.gguf").write_bytes(b"")
    assert model_id(str(tmp_path / "Model-Q4.gguf")) == "Model-Q4"
    assert model_id("no/such/file.gguf") == "no/such/file.gguf"


def test_health_says_who_holds_slots(server):
    reply = server.get("/health")
    report = reply.json
    assert reply.status == 200
    assert report["status"] == report["invariant"] == "ok"
    assert report["slots"] == {"free": 60, "request": 10, "cached": 20, "donor": 10, "total": 100}
    assert "window_slots" not in report
    assert "states" not in report
    assert report["requests"] == {"running": 1, "waiting": 2}
    assert (report["model"], report["graft"]) == ("fake", "accepted")


def test_health_and_metrics_say_what_audits_have_shown(server):
    assert server.get("/health").json["risk"] == {
        "status": "uncalibrated",
        "reason": "no calibration is in use",
        "classes": {},
        "pending_audits": 7,
        "left_out_audits": 8,
    }
    server.engine.class_risks = {
        "shifted": {"later": RiskStatement(RiskStatus.CERTIFIED, 0.02, 0.05, "first_token", "10 %", 300, part="later")},
        "composed": {"whole": RiskStatement(RiskStatus.BREACHED, 0.02, 0.05, "first_token", "full", 0, part="whole")},
    }
    told = server.get("/health").json["risk"]["classes"]
    assert told["shifted"]["later"] == {
        "status": "certified",
        "epsilon": 0.02,
        "delta": 0.05,
        "loss": "first_token",
        "notch": "10 %",
        "audits": 300,
        "part": "later",
    }
    assert told["composed"]["whole"]["status"] == "breached"
    lines = server.get("/metrics").body.decode().splitlines()
    labels = 'model_name="fake",notch="10 %",part="later",reuse_class="shifted",status="certified"'
    assert f"kvgraft:risk_audits{{{labels}}} 300.0" in lines
    assert 'kvgraft:risk_certified{model_name="fake",part="later",reuse_class="shifted"} 0.02' in lines
    assert 'kvgraft:risk_certified{model_name="fake",part="whole",reuse_class="composed"} 1.0' in lines
    server.engine.class_risks = {}
    assert "risk_audits{" not in server.get("/metrics").body.decode()


def test_health_and_metrics_say_what_is_taken_of_each_limit(server):
    memory = server.get("/health").json["memory"]
    assert memory["kv"] == {"used_bytes": 100, "limit_bytes": 200}
    assert memory["host_donors"] == {"used_bytes": 4, "limit_bytes": 50}
    assert memory["host_prefixes"] == {"used_bytes": 0, "limit_bytes": 0}
    assert memory["donor_tokens"] == {"used": 300, "limit": 1_000}
    assert 0 < memory["process"]["resident_bytes"] < memory["process"]["limit_bytes"]
    assert memory["process"]["limited_by"] in {"cgroup", "machine"}
    text = server.get("/metrics").body.decode()
    assert 'kvgraft:memory_used_bytes{model_name="fake",pool="kv"} 100.0' in text
    assert 'kvgraft:memory_limit_bytes{model_name="fake",pool="host_donors"} 50.0' in text
    assert 'kvgraft:donor_host_limit_bytes{model_name="fake"} 50.0' in text


def test_metrics_say_whether_grafts_are_refused(server):
    line = 'kvgraft:graft_refused{{model_name="fake"}} {}'
    assert line.format("0.0") in server.get("/metrics").body.decode()
    server.engine.graft_refusal = "learned positions"
    assert line.format("1.0") in server.get("/metrics").body.decode()


def test_health_says_who_holds_slots_of_window_layers(server):
    server.engine.window_usage = SlotUsage(5, 1, 2, 0, 8)
    assert server.get("/health").json["window_slots"] == {"free": 5, "request": 1, "cached": 2, "donor": 0, "total": 8}


def test_health_says_who_holds_states(server):
    server.engine.state_usage = SlotUsage(5, 1, 2, 0, 8)
    assert server.get("/health").json["states"] == {"free": 5, "request": 1, "cached": 2, "donor": 0, "total": 8}


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"is_alive": False}, "engine_dead"),
        ({"check_error": CorruptCacheError("a slot is lost")}, "invariant_broken"),
        ({"check_error": AssertionError("a check of another package's cache")}, "invariant_broken"),
    ],
)
def test_health_is_503_when_the_engine_is_not_well(server, change, status):
    vars(server.engine).update(change)
    reply = server.get("/health")
    assert (reply.status, reply.json["status"]) == (503, status)


def test_health_is_503_while_shutting_down(server):
    asyncio.run(server.app.state.context.close(0))
    reply = server.get("/health")
    assert (reply.status, reply.json["status"]) == (503, "shutting_down")


def test_checks_run_at_most_once_a_second(server):
    for _ in range(5):
        server.get("/health")
    assert server.engine.num_checks == 1


def test_a_repaired_invariant_is_seen(server, monkeypatch):
    monkeypatch.setattr(health, "CHECK_INTERVAL_S", 0.0)
    server.engine.check_error = CorruptCacheError("a slot is lost")
    assert server.get("/health").json["invariant"] == "a slot is lost"
    server.engine.check_error = None
    assert server.get("/health").status == 200


def test_check_that_never_ends_is_reported_as_stuck(server, monkeypatch):
    monkeypatch.setattr(health, "_PATIENCE_S", 0.01)
    monkeypatch.setattr(health, "_STUCK_S", 0.0)
    server.engine.check = asyncio.Event().wait
    assert server.get("/health").json["status"] == "engine_stuck"


def test_slow_check_does_not_hold_the_answer(server, monkeypatch):
    monkeypatch.setattr(health, "_PATIENCE_S", 0.01)
    server.engine.check = asyncio.Event().wait
    assert server.get("/health").json["status"] == "ok"


def test_an_answer_does_not_wait_for_a_step_if_the_check_before_was_well(server, monkeypatch):
    monkeypatch.setattr(health, "CHECK_INTERVAL_S", 0.0)
    monkeypatch.setattr(health, "_PATIENCE_S", 3_600.0)
    monkeypatch.setattr(health, "_KEPT_S", 3_600.0)
    assert server.get("/health").status == 200
    server.engine.check = asyncio.Event().wait
    assert server.get("/health").json["status"] == "ok"


def test_an_answer_waits_for_a_check_if_the_one_before_is_long_ago(server, monkeypatch):
    monkeypatch.setattr(health, "CHECK_INTERVAL_S", 0.0)
    monkeypatch.setattr(health, "_KEPT_S", 0.0)
    assert server.get("/health").status == 200
    server.engine.check_error = CorruptCacheError("a slot is lost")
    assert server.get("/health").status == 503


def test_refusal_of_graft_is_told(server):
    server.engine.graft_refusal = "learned positions"
    assert server.get("/health").json["graft"] == "refused: learned positions"


def test_metrics_show_the_engine_and_the_responses(server):
    server.complete()
    server.get("/made/up/by/a/client")
    reply = server.get("/metrics")
    lines = reply.body.decode().splitlines()
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'kvgraft:kv_slots{holder="free",model_name="fake"} 60.0' in lines
    assert 'kvgraft:num_requests_waiting{model_name="fake"} 2.0' in lines
    assert 'kvgraft:graft_errors_total{model_name="fake"} 5.0' in lines
    assert 'kvgraft:http_responses_total{endpoint="/v1/completions",model_name="fake",status="200"} 1.0' in lines
    assert 'kvgraft:http_responses_total{endpoint="other",model_name="fake",status="404"} 1.0' in lines
    assert 'kvgraft:heal_candidates{model_name="fake"} 11.0' in lines
    assert 'kvgraft:healed_tokens_total{model_name="fake"} 120.0' in lines
    assert 'kvgraft:heals_dropped_total{model_name="fake",reason="pressure"} 14.0' in lines
    assert server.get("/health").json["healing"] == {"candidates": 11, "healed_tokens": 120, "healed_requests": 13}


def test_reset_of_the_prefix_cache_reaches_the_engine_and_needs_a_key(make_server):
    server, key = make_server(api_key="secret"), (b"authorization", b"Bearer secret")
    assert server.post("/reset_prefix_cache", {}).status == 401
    assert server.engine.num_resets == 0
    reply = server.post("/reset_prefix_cache", {}, headers=[key])
    assert (reply.status, reply.json) == (200, {"status": "ok"})
    assert server.engine.num_resets == 1
    assert server.get("/reset_prefix_cache", headers=[key]).status == 405
