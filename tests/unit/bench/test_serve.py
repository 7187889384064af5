"""The load test as a whole: what is sent to which server, in which order, and what workloads there are."""

from __future__ import annotations

import json
from contextlib import contextmanager

import pytest

from kvgraft.bench.arrivals import Load
from kvgraft.bench.plot import draw_load
from kvgraft.bench.serve import (
    AnswerCheck,
    GivenServer,
    LoadSettings,
    LoadTest,
    OwnServer,
    Side,
    check_answers,
    measure_loads,
    search_rates,
)
from kvgraft.bench.serve_workload import BUILTIN_RAG, ServeWorkload, load_workload, token_counter
from kvgraft.bench.summary import RunSummary
from kvgraft.errors import ConfigError

SETTINGS = LoadSettings(duration_s=0.5, requests=None, max_tokens=3, warmup=2, seed=0, give_up_s=5.0)
WORKLOAD = ServeWorkload("pack", tuple(f"prompt {i}" for i in range(20)), None)


def modes_of(target):
    return {mode: Side(target, mode) for mode in ("off", "exact", "graft")}


def run_of(mode, rate, *, ttft=100.0, stable=True):
    times = {"mean": ttft, "p50": ttft, "p90": ttft, "p95": ttft, "p99": ttft}
    done = 10 if stable else 9
    return RunSummary(
        mode,
        rate,
        10,
        10,
        done,
        {},
        10 - done,
        None if stable else "slow",
        1,
        1,
        done,
        30,
        100,
        0.5,
        1,
        times,
        times,
        times,
        times,
    )


def test_run_warms_up_then_measures_in_order(fake):
    test = LoadTest(WORKLOAD, SETTINGS, modes_of(GivenServer(fake.url)))
    calls = []
    run = test.run("graft", Load(rate=16.0), lambda: calls.append(1))
    assert (run.mode, run.rate, run.planned, run.completed, len(calls)) == ("graft", 16.0, 8, 8, 8)
    assert sorted(body["prompt"] for body in fake.bodies[:2]) == ["prompt 0", "prompt 1"]
    assert [body["prompt"] for body in fake.bodies[2:]] == [f"prompt {i}" for i in range(2, 10)]
    assert {body["kvgraft"]["reuse"] for body in fake.bodies} == {"graft"}
    assert {body["model"] for body in fake.bodies} == {"fake"}
    assert run.reused_share == pytest.approx(0.4)
    assert len(test.rows) == 8
    assert test.server["id"] == "fake"


def test_every_run_on_a_given_server_has_a_salt_of_its_own(fake):
    test = LoadTest(WORKLOAD, SETTINGS, modes_of(GivenServer(fake.url.removeprefix("http://"))))
    test.run("off", Load(rate=20.0))
    test.run("graft", Load(rate=20.0))
    assert len({body["cache_salt"] for body in fake.bodies}) == 2


def test_every_run_of_an_own_server_starts_one(fake, monkeypatch):
    started = []

    @contextmanager
    def process(arguments):
        started.append(arguments)
        yield fake

    monkeypatch.setattr("kvgraft.bench.serve.ServerProcess", process)
    test = LoadTest(WORKLOAD, SETTINGS, modes_of(OwnServer(["--model", "m"])))
    test.run("off", Load(rate=20.0))
    test.run("exact", Load(rate=20.0))
    assert started == [("--model", "m")] * 2
    assert all("cache_salt" not in body for body in fake.bodies)


def test_requests_are_bounded_by_the_workload():
    def count(rate, **changes):
        settings = LoadSettings(
            **{"duration_s": 2.0, "requests": None, "max_tokens": 1, "warmup": 5, "seed": 0, "give_up_s": 1} | changes
        )
        return LoadTest(WORKLOAD, settings, modes_of(GivenServer(""))).num_requests(Load(rate=rate))

    assert [count(rate) for rate in (0.1, 2, 6, 100)] == [1, 4, 12, 15]
    assert count(2, requests=7) == 7
    with pytest.raises(ConfigError, match="20 prompts that fit, --warmup takes 20"):
        count(1, warmup=20)


def test_prompts_that_do_not_fit_are_left_out_once_the_server_has_told_its_limit(fake):
    workload = ServeWorkload("pack", ("short", "a very long one", "tiny", "small"), (1.0, 2.0, 3.0, 4.0))
    fake.models = ({"id": "fake", "max_model_len": 6},)
    seen = []

    def fit(prompts, served):
        seen.append(served)
        return prompts.no_longer_than(served["max_model_len"], len)

    test = LoadTest(workload, LoadSettings(1.0, 9, 3, 1, 0, 5.0), modes_of(GivenServer(fake.url)), fit)
    assert test.run("off", Load(rate=50.0)).planned == 2
    test.run("off", Load(rate=50.0))
    assert (test.workload.skipped, test.workload.times) == (1, (1.0, 3.0, 4.0))
    assert seen == [{"id": "fake", "max_model_len": 6}]
    with pytest.raises(ConfigError, match="every prompt is longer than 2"):
        workload.no_longer_than(2, len)


def test_clients_send_one_request_at_a_time(fake):
    test = LoadTest(WORKLOAD, SETTINGS, modes_of(GivenServer(fake.url)))
    run = test.run("off", Load(clients=4))
    assert (run.clients, run.rate, run.planned, run.completed, run.kept_up) == (4, 0.0, 18, 18, 1.0)
    assert run.gap_ms["p50"] >= 0.0
    assert run.requests_per_s == pytest.approx(18 / run.seconds)


def test_named_servers_are_asked_as_they_are_set_up_and_their_answers_compared(fake):
    other = type(fake)(tokens=(" a", " b", " other"))
    other.start()
    try:
        sides = {
            "off": Side(GivenServer(fake.url)),
            "own": Side(GivenServer(fake.url)),
            "else": Side(GivenServer(other.url)),
        }
        test = LoadTest(WORKLOAD, SETTINGS, sides)
        assert check_answers(test, 3) == {"own": AnswerCheck(3, 3), "else": AnswerCheck(0, 3)}
        assert not any("kvgraft" in body for body in fake.bodies)
        assert [body["prompt"] for body in fake.bodies] == [f"prompt {i}" for i in range(5)] * 2, (
            "warm-up, then answers"
        )
        assert len({body["cache_salt"] for body in fake.bodies}) == 2
        other.status = 500
        assert check_answers(test, 2)["else"] == AnswerCheck(0, 0, "2 were not answered")
    finally:
        other.stop()


def test_server_without_models_is_refused(fake):
    fake.models = ()
    with pytest.raises(ConfigError, match="no model"):
        LoadTest(WORKLOAD, SETTINGS, modes_of(GivenServer(fake.url))).run("off", Load(rate=10.0))


def test_every_mode_runs_at_a_rate_before_the_next_and_a_lost_mode_stops():
    calls = []

    def run(mode, load):
        calls.append((mode, load.rate))
        return run_of(mode, load.rate, stable=mode == "graft" or load.rate < 2)

    measure_loads(run, ["off", "graft"], [Load(rate=rate) for rate in (4.0, 1.0, 2.0, 2.0)])
    assert calls == [("off", 1), ("graft", 1), ("off", 2), ("graft", 2), ("graft", 4)]


def test_search_takes_its_limit_from_off_and_the_others_take_turns():
    capacity = {"off": 3.0, "exact": 3.5, "graft": 10.0}
    calls = []

    def run(mode, rate):
        calls.append(mode)
        return run_of(mode, rate, ttft=100 * rate / capacity[mode], stable=rate <= capacity[mode])

    runs, limit = search_rates(run, ["off", "exact", "graft"], 1.0, None, 12)
    assert limit == pytest.approx(100, rel=0.1)
    assert calls[: calls.index("exact")] == ["off"] * calls.index("exact")
    assert calls[calls.index("exact") :][:4] == ["exact", "graft"] * 2
    best = {mode: max(r.rate for r in runs if r.mode == mode and r.sustains(limit)) for mode in capacity}
    assert best == pytest.approx(capacity, rel=0.15)


def test_search_without_off_needs_a_limit():
    with pytest.raises(ConfigError, match="--slo-ttft-ms"):
        search_rates(run_of, ["graft"], 1.0, None, 3)
    assert search_rates(lambda *a: run_of(*a, stable=False), ["off", "graft"], 1.0, None, 3)[1] is None


def test_plot_is_a_png(tmp_path):
    runs = [run_of(mode, rate, stable=rate < 2) for mode in ("off", "graft", "x") for rate in (1.0, 2.0)]
    for limit in (None, 50.0):
        draw_load(runs, limit, "title", tmp_path / "load.png")
        assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")


def test_builtin_workload_is_seeded_and_shares_passages():
    workload = load_workload(BUILTIN_RAG, 30, 1)
    assert len(workload.prompts) == len(set(workload.prompts)) == 30
    assert workload.prompts == load_workload(BUILTIN_RAG, 30, 1).prompts
    assert workload.times is None
    passages = [part for prompt in workload.prompts for part in prompt.split("\n\n### ")[1:]]
    assert 0.1 < len(set(passages)) / len(passages) < 0.6


def test_pack_keeps_its_arrivals_and_pairs_are_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"input": f"p{i}", "t": i}) + "\n" for i in range(3)))
    assert load_workload(str(tmp_path / "a"), 99, 0) == ServeWorkload("a", ("p0", "p1", "p2"), (0.0, 1.0, 2.0))
    (tmp_path / "b.pairs.jsonl").write_text(json.dumps({"a": "x", "b": "y"}) + "\n")
    with pytest.raises(ConfigError, match="no order of arrival"):
        load_workload(str(tmp_path / "b.pairs"), 1, 0)


def test_tokens_are_counted_by_the_bundled_tokenizer_or_estimated():
    text = "def f(x): return x"
    assert 4 <= token_counter(None, "graft-tiny")(text) <= 12
    assert token_counter(None, "another")(text) > 4
