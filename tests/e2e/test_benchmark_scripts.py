"""Every script in `benchmarks/` at toy size: it runs, and its figures move when what it measures does.

A script that needs an engine or a package that is not here is run as far as that goes: its arithmetic against a stand-in for
the server, or its help.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import importlib.util
import io
import itertools
import json
import os
import py_compile
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from aiohttp import web
from tests.store_servers import need_mooncake, need_redis
from tests.unit.bench.simulation import SimulatedServer, run_in_simulated_time

from kvgraft.bench.client import TimedRequest
from kvgraft.donors import DonorCatalogue
from kvgraft.engine import LLM, SamplingParams
from kvgraft.engine.requests.request import StreamPart
from kvgraft.engine.sampling.sampling import Sampler
from kvgraft.engine.schedule.drafts import Drafts
from kvgraft.graft.drift_layout import DriftRun, RunLayout
from kvgraft.graft.select import Observation, SelectionContext
from kvgraft.graft.select.repeats import MOST_COUNTED, REPEAT_WEIGHT
from kvgraft.models import bundled_model_path, smollm2_path
from kvgraft.prefix import EvictResult, RadixCache

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.slow

HELPERS = {
    "engines/embedded_worker.py",
    "engines/model_families.py",
    "engines/suite_servers.py",
    "engines/vllm_replicas.py",
    "engines/vllm_server.py",
    "mixed_prompts.py",
    "passage_patches.py",
    "peers/kvboost_worker.py",
    "peers/llama_cpp_server.py",
    "peers/suite_peer_servers.py",
    "prefix/sglang_stand_ins.py",
    "prefix/trees.py",
    "prefix/block_traces.py",
    "prefix/replay.py",
    "replicas.py",
    "shared_text.py",
    "semantic/suites.py",
}
"""Imported by the scripts, or started by them where their engine is."""

COVERED = HELPERS | {
    "bench_lookup.py",
    "bench_radix.py",
    "bench_risk.py",
    "bench_streams.py",
    "continued_turns.py",
    "donor_substitution.py",
    "drift_cost.py",
    "drift_estimators.py",
    "drift_stream.py",
    "exact_rounding.py",
    "fidelity_pairs.py",
    "heal_load.py",
    "host_copies.py",
    "inspector_overhead.py",
    "miss_overhead.py",
    "patches.py",
    "record.py",
    "repeated_text.py",
    "routing.py",
    "first_tokens.py",
    "repair_designs.py",
    "run_rows.py",
    "risk_streams.py",
    "soak.py",
    "startup.py",
    "state_turns.py",
    "store_remote.py",
    "store_bandwidth.py",
    "store_crash.py",
    "store_scan.py",
    "store_soak.py",
    "structured.py",
    "two_replicas.py",
    "verified.py",
    "verified_ttft.py",
    "warm_restart.py",
    "prefix/bench_events.py",
    "prefix/bench_host_tier.py",
    "prefix/bench_hybrid_chat.py",
    "prefix/bench_hybrid_memory.py",
    "prefix/bench_policies.py",
    "prefix/bench_trees.py",
    "prefix/soak.py",
    "prefix/state_recording.py",
    "prefix/table.py",
    "engines/agent_times.py",
    "engines/agent_traces.py",
    "engines/answers.py",
    "engines/dynamo_selection.py",
    "engines/idle_connector.py",
    "engines/families.py",
    "engines/make_model.py",
    "engines/make_smollm2.py",
    "engines/new_text.py",
    "engines/rounds.py",
    "engines/sglang_rag.py",
    "engines/sglang_restart.py",
    "engines/sglang_ttft.py",
    "engines/suite_engines.py",
    "engines/two_commits.py",
    "engines/burst_stalls.py",
    "engines/one_text.py",
    "engines/phase_cost.py",
    "engines/vllm_burst.py",
    "engines/vllm_restart.py",
    "engines/vllm_ttft.py",
    "peers/exact_runs.py",
    "peers/peers_ttft.py",
    "peers/suite_peers.py",
    "semantic/discovery.py",
}


def test_every_script_has_a_test_here():
    found = {str(path.relative_to(BENCHMARKS)) for path in BENCHMARKS.rglob("*.py")}
    assert {name for name in found if not name.startswith(("suite/", "gpu/"))} == COVERED, (
        "these two have tests in tests/unit/benchmarks"
    )


@pytest.fixture
def load(monkeypatch):
    """Return a function that imports a script with its folder on the path, as `python SCRIPT` would."""
    known = set(sys.modules)

    def load_script(name):
        path = BENCHMARKS / name
        monkeypatch.syspath_prepend(str(path.parent))
        spec = importlib.util.spec_from_file_location(f"benchmark_{path.stem}", path)
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    path = list(sys.path)
    yield load_script
    sys.path[:] = path
    ours = (str(BENCHMARKS), str(Path(__file__).parents[1]))
    for name in set(sys.modules) - known:  # `server` and `models` are other modules for others
        if str(getattr(sys.modules[name], "__file__", None)).startswith(ours):
            del sys.modules[name]


@pytest.fixture
def run(monkeypatch, capsys):
    """Return a function that runs a script's `main` and returns its exit code and what it printed."""

    def run_main(module, *argv):
        monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, argv)])
        capsys.readouterr()
        code = module.main()
        return code, capsys.readouterr().out

    return run_main


def test_answers_of_exact_kv_are_compared_with_a_lone_full_prefill(load, run):
    script = load("exact_rounding.py")
    code, out = run(script, "--dtypes", "float32", "--prompts", 3, "--prompt-tokens", 120, "--tokens", 4, "--rows", 32)
    rows = json.loads(out)["rows"]
    assert code == 0
    assert [(row["way"], row["differ"]) for row in rows] == [(way, 0) for way in script.WAYS]
    assert script.first_differences([(1, 2, 3), (4, 5)], [(1, 2, 9), (4, 5)]) == {"differ": 1, "earliest": 3}


def test_copies_to_host_memory_are_counted_on_both_kinds_of_memory(load, run, monkeypatch):
    script = load("host_copies.py")
    monkeypatch.setattr(script, "_KEPT", 3)
    monkeypatch.setattr(script, "_REST_S", 0)
    code, out = run(script, "--tokens", 40, "--rounds", 7)
    rows = json.loads(out)["rows"]
    assert (code, [(row["memory"], row["rounds"]) for row in rows]) == (0, [("new", 2), ("used before", 4)])
    rng = np.random.default_rng(0)
    cache = script.Cache(40, rng)
    for ours, theirs in zip(cache.packed().keys, cache.apart().keys, strict=True):
        assert np.array_equal(ours, theirs)


def test_pairs_of_a_miss_and_none_are_kept_and_go_on(load, run, tmp_path):
    script, journal = load("miss_overhead.py"), tmp_path / "journal.jsonl"
    options = ("--model", "graft-tiny", "--lengths", 60, 90, "--num-slots", 300, "--journal", journal)
    assert run(script, *options, "--pairs", 1)[0] == 0
    first = journal.read_text().splitlines()
    assert len(first) == 1 + 2
    code, out = run(script, *options, "--pairs", 3)
    rows = json.loads(out)["rows"]
    assert (code, [(row["length"], row["pairs"]) for row in rows]) == (0, [(60, 3), (90, 3)])
    assert all(row["miss_overhead_percent_low"] <= row["miss_overhead_percent_high"] for row in rows)
    assert journal.read_text().splitlines()[: len(first)] == first


def test_reused_tokens_are_no_miss(load, run, monkeypatch):
    script = load("miss_overhead.py")
    monkeypatch.setattr(script.Draws, "tokens", lambda _, count: np.arange(3, 3 + count))
    with pytest.raises(SystemExit, match="tokens of a prompt that is new were reused"):
        run(script, "--model", "graft-tiny", "--lengths", 60, "--num-slots", 300, "--pairs", 1)


def test_next_turn_goes_on_from_a_recorded_state(load, capsys):
    script = load("state_turns.py")
    sizes = ("--layers", "4", "--lengths", "40", "80", "--new", "8", "--rounds", "1")
    assert script.main([*sizes]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [turn["tokens"] for turn in result["turns"]] == [40, 80]
    assert result["bytes_per_state"] > result["bytes_per_token"]
    assert all(turn["ratio"] == turn["off_s"] / turn["exact_s"] for turn in result["turns"])


def test_a_turn_that_reuses_nothing_is_no_figure(load, monkeypatch):
    """Its times would be those of two full prefills."""
    script = load("state_turns.py")
    llm = script.make_llm("qwen3_5_text", 4, 200)
    monkeypatch.setattr(llm.space, "store_prefix", lambda *_, **__: None)
    with pytest.raises(RuntimeError, match="0 tokens reused of 55"):
        script.next_turn(llm, np.random.default_rng(0), 40, 8, off_first=True)


def test_rows_of_one_run_are_compared(load, run, tmp_path):
    words = " ".join(f"word{number % 97}" for number in range(2_000))
    record = {"rid": "0", "parts": [{"text": "Read this."}, {"doc": "long"}], "answers": []}
    (tmp_path / "xinstr.requests.jsonl").write_text(json.dumps(record) + "\n")
    (tmp_path / "xinstr.docs.jsonl").write_text(json.dumps({"doc": "long", "text": words}) + "\n")
    code, out = run(load("run_rows.py"), "--model", "graft-tiny", "--data", tmp_path, "--cases", 1, "--tokens", 2)
    assert code == 0
    found = json.loads(out)
    (row,) = found["rows"]
    assert row["document_tokens"] == 700
    assert row["128"]["recomputed_tokens"] == row["32"]["recomputed_tokens"] > 64
    assert row["128"]["mean_kl"] != row["32"]["mean_kl"]
    assert found["summary"]["128"]["mean_kl"]["times_first"] == 1.0


def test_first_tokens_are_counted_by_how_sure_they_are(load, run):
    script = load("first_tokens.py")
    code, out = run(script, "--model", "graft-tiny", "--limit", 4, "--max-prompt-tokens", 600)
    found = json.loads(out)
    assert code == 0
    assert found["summary"]["all"]["n"] == len(found["rows"]) > 0
    assert all(row["kl_after"] != row["kl_before"] for row in found["rows"])
    by_margin = found["summary"]["builtin"]["by_margin"]
    assert [row["wait"] for row in by_margin] == sorted(row["wait"] for row in by_margin)
    assert (by_margin[0]["wait"], by_margin[-1]["wait"]) == (0.0, 1.0)
    assert by_margin[-1]["flips"] == found["summary"]["builtin"]["flips_before"]


def test_designs_of_a_repair_are_compared_over_the_same_donors(load, run):
    script = load("repair_designs.py")
    code, out = run(script, "--model", "graft-tiny", "--limit", 2, "--max-prompt-tokens", 600, "--rows", 8, 100_000)
    found = json.loads(out)
    assert code == 0
    assert found["rows_measured"]
    for row in found["rows_measured"]:
        designs = row["designs"]
        assert len({each["kl"][0] for each in designs.values()}) == 1  # the first token comes before any of them
        # What steps of its own compute at once is what the engine serves by default.
        assert designs["importance:100000"]["kl"] == pytest.approx(designs["at once"]["kl"], rel=0.01, abs=1e-6)
        assert designs["none"]["kl"] != pytest.approx(designs["at once"]["kl"], rel=0.01, abs=1e-6)
        assert designs["importance:8"]["kl"] != designs["correction:8"]["kl"] != designs["at once"]["kl"]
        assert row["reused"] > designs["at once"]["rows"] == designs["importance:8"]["rows"] >= row["reused"] / 10
        assert designs["causal:100000"]["kl"][1:] == pytest.approx([0.0] * 31, abs=1e-5)  # all of it is exact
    figures = found["summary"]["all"]
    assert figures["none"]["time_of_token"] == {"1": 1.0, "2": 1.0, "8": 1.0, "16": 1.0, "32": 1.0}
    low, high = figures["at once"]["kl_2_to_32_ci"]
    assert low <= figures["at once"]["kl_2_to_32"] <= high


def test_a_repeated_text_is_compared_with_one_that_is_said_once(load, run):
    code, out = run(load("repeated_text.py"), "--model", "graft-tiny", "--cases", 2, "--tokens", 3)
    found = json.loads(out)
    assert (code, [row["quoted_entries"] for row in found["rows"]]) == (0, [1, 2])
    for row in found["rows"]:
        once, repeated, tenth = row["once"], row["repeated"], row["repeated, a tenth"]
        for other in (repeated, tenth):
            assert other["shifted_tokens"] + other["recomputed_tokens"] == pytest.approx(
                once["shifted_tokens"] + once["recomputed_tokens"], abs=3
            ), "the same quotation"
        more = (REPEAT_WEIGHT - 1) * MOST_COUNTED / 10
        assert repeated["recomputed_tokens"] == pytest.approx(tenth["recomputed_tokens"] + more, abs=2)
        assert tenth["recomputed_tokens"] == pytest.approx(once["recomputed_tokens"], abs=2)
    assert found["medians"]["once"]["mean_kl_of_once"] == 1


class TestContinuedTurns:
    """Conversations that go on, beside those that graft anew, on a model whose answers say nothing."""

    def test_turns_are_compared_with_full_prefill_and_kept(self, load, run, tmp_path):
        script, journal = load("continued_turns.py"), tmp_path / "journal.jsonl"
        argv = ("--model", "graft-tiny", "--sessions", 2, "--turns", 3, "--data", tmp_path, "--journal", journal)
        code, out = run(script, *argv)
        found = json.loads(out)
        assert (code, found["absent"]) == (0, ["mturn", "quoted", "taubench"])
        assert [(row["kind"], row["turn"], row["sessions"]) for row in found["rows"]] == [
            ("manual", turn, 2) for turn in (1, 2, 3)
        ]
        first, *others = found["rows"]
        assert first["continued"]["shifted_tokens"] > 0
        assert first["continued"]["mean_kl"] == first["repeated"]["mean_kl"]
        for row in others:
            assert row["continued"]["continued_tokens"] > row["continued"]["computed_tokens"]
            assert row["continued"]["generation"] == row["none"]["generation"] == 1
            assert row["repeated"]["continued_tokens"] == row["none"]["recomputed_tokens"] == 0
            assert row["continued"]["mean_kl_low"] <= row["continued"]["mean_kl"] <= row["continued"]["mean_kl_high"]
        before = journal.read_text()
        assert json.loads(run(script, *argv)[1]) == found
        assert journal.read_text() == before

    def test_packs_give_conversations_behind_documents(self, load, tmp_path):
        script = load("continued_turns.py")
        documents = [json.dumps({"doc": str(number), "text": f"{number} " * 900}) for number in range(3)]
        (tmp_path / "xinstr.docs.jsonl").write_text("\n".join(documents))
        turns = [{"group": "g", "parts": [{"text": "-"}, {"text": f"User: q{i}"}, {"text": "-"}]} for i in range(4)]
        lines = [json.dumps(turn | {"answers": [f"a{number}"]}) for number, turn in enumerate(turns)]
        (tmp_path / "mturn.requests.jsonl").write_text("\n".join(lines))
        args = argparse.Namespace(data=str(tmp_path), seed=0, turns=3, characters=(300, 400))
        (session,) = script.mturn(args)
        assert session.turns == [("q0", "a0"), ("q1", "a1"), ("q2", "a2")]
        assert 300 <= len(session.document) <= 400
        assert session.prompt(1).endswith("User: q0\n\nAssistant: a0\n\nUser: q1\n\nAssistant:")
        assert session.prompt(2).startswith(session.prompt(1))
        assert session.document in session.read_before
        assert session.notes not in session.read_before


class TestNewText:
    """Servers that answer in simulated times."""

    @pytest.fixture
    def script(self, load):
        return load("engines/new_text.py")

    def test_every_side_is_asked_for_the_same_prompts_and_each_first_in_turn(self, script):
        asked = []

        class Answers:
            found: ClassVar[list] = []

            def __init__(self, name):
                self.name, self.found = name, []

            def ask(self, prompt):
                asked.append((self.name, tuple(prompt)))
                return script.Measured(1.0, 0.5, 0)

        sides = [Answers("off"), Answers("kvgraft")]
        args = argparse.Namespace(tokens=30, warmup=1, rounds=4, healing=True)
        script.measure(sides, args, np.random.default_rng(0))
        assert [len(side.found) for side in sides] == [4, 4]
        alone = [pair for pair in asked if len(pair[1]) == 30][2:]  # after the document that is left to heal
        assert [name for name, _ in alone[:4]] == ["off", "kvgraft", "kvgraft", "off"]
        grafted = {prompt for _, prompt in asked if len(prompt) == 100}
        assert len(grafted) == 2, "text to heal is left anew after four rounds"

    def test_starts_are_counted_together_and_told_apart(self, script):
        starts = [
            {"exact": [script.Measured(1.0, 0.5, 0)] * 4, "kvgraft": [script.Measured(value, 0.5, 0)] * 4}
            for value in (0.9, 1.2)
        ]
        row = script.rows_of("vLLM", starts, 0)[1]
        assert (row["rounds"], row["ms_of_exact"], row["ms_of_exact_by_start"]) == (8, 1.05, [0.9, 1.2])

    def test_ratios_are_those_of_medians(self, script):
        off = [script.Measured(1.0, 0.5, 0)] * 5
        exact = [script.Measured(0.5, 0.3, 0)] * 5
        row = script.figures([script.Measured(1.1, 0.6, 0)] * 5, {"off": off, "exact": exact}, 0)
        assert (row["ms_of_off"], row["cpu_ms_of_off"], row["ms_of_off_ci"]) == (1.1, 1.2, [1.1, 1.1])
        assert (row["ms_of_exact"], row["cpu_ms_of_exact"]) == (2.2, 2.0)

    def test_processor_time_is_that_of_the_group(self, script):
        before, started = script.cpu_seconds(os.getpgid(0)), time.process_time()
        while time.process_time() < started + 0.05:
            pass
        assert script.cpu_seconds(os.getpgid(0)) >= before + 0.04
        assert script.cpu_seconds(1 << 30) == 0.0


def test_startup_takes_mistakes_that_end_in_one_line(load, run, monkeypatch):
    script = load("startup.py")
    mistakes = {"wrong setting": ("serve", "--reuse", "grfat")}
    monkeypatch.setattr(script, "_mistakes", lambda port: mistakes)
    monkeypatch.setattr(script, "_until_ready", lambda: 2.0)
    code, out = run(script, "--runs", "1", "--json")
    result = json.loads(out)["median_ms"]
    assert not code
    assert result["wrong setting"] > 0
    assert result["good start: serve graft-tiny"] == 2000
    mistakes["no mistake"] = ("--version",)
    with pytest.raises(SystemExit, match="ended with 0"):
        run(script, "--runs", "1", "--json")


def test_the_page_is_watched_while_a_server_answers(load, run, monkeypatch):
    script = load("inspector_overhead.py")
    monkeypatch.setattr(script, "ENGINE_PERIOD_S", 0.1)
    code, out = run(
        script,
        "--model",
        "graft-tiny",
        "--rounds",
        "2",
        "--words",
        "20",
        "--output-tokens",
        "4",
        "--pages",
        "2",
        "--json",
    )
    ways = json.loads(out)["ways"]
    assert (code, list(ways)) == (0, ["off", "on", "open"])
    assert ways["off"]["ttft_ratio"] == ways["off"]["tokens_per_s_ratio"] == 1
    assert all(row["ttft_ms"] > 0 and row["paired_ttft_ratio"] > 0 for row in ways.values())


class TestLookup:
    @pytest.fixture
    def script(self, load, monkeypatch):
        script = load("bench_lookup.py")
        toy = {"PROMPT_TOKENS": 2_048, "PIECE_TOKENS": 128, "DOCUMENT_TOKENS": 512, "REPEATS": 3, "NUM_TWINS": 20}
        for name, value in (toy | {"SIZES": ((200, 256),)}).items():
            monkeypatch.setattr(script, name, value)
        return script

    def test_finds_what_prompts_share_with_donors(self, script, run):
        _, out = run(script, "--json", "--quick")
        result = json.loads(out)
        (lookup,) = result["lookup"]
        assert [lookup[kind]["matched_tokens"] for kind in ("pieces", "shifted", "fresh")] == [2_048, 512, 0]
        assert lookup["pieces"]["p50"] > 0
        assert all(case["matches"] > 0 for case in result["hostile"].values())

    def test_a_catalogue_that_finds_nothing_fails_it(self, script, run, monkeypatch):
        monkeypatch.setattr(DonorCatalogue, "find", lambda *_, **__: [])
        with pytest.raises(SystemExit, match="pieces prompts share 2048 tokens with donors, 0 were found"):
            run(script, "--json", "--quick")


class TestRadix:
    @pytest.fixture
    def script(self, load, monkeypatch):
        script = load("bench_radix.py")
        monkeypatch.setattr(script, "LENGTHS", (1_024,))
        monkeypatch.setattr(script, "REPEATS", 5)
        return script

    def test_prints_times(self, script, run):
        _, out = run(script, "--nodes", 200)
        lines = out.splitlines()
        assert len(lines) == 5 + 2 * 4
        assert all(float(line.split()[-2]) > 0 for line in lines)

    @pytest.mark.parametrize(("method", "words"), [("insert", "one node matched 0"), ("evict", "freed fewer")])
    def test_a_tree_that_does_nothing_fails_it(self, script, run, monkeypatch, method, words):
        monkeypatch.setattr(RadixCache, method, lambda *_, **__: None)
        if method == "insert":
            with pytest.raises(SystemExit, match=words):
                run(script, "--nodes", 200)
        else:
            with pytest.raises(SystemExit, match=words):
                script.bench_eviction(200, 1)


class TestRisk:
    @pytest.fixture
    def script(self, load):
        return load("bench_risk.py")

    def test_holds_what_was_asked(self, script, run):
        code, out = run(script, "--json", "--streams", 60, "--audits", 3_000, "--served", 1_500)
        assert code == 0
        result = json.loads(out)
        assert all(row["wrong"] <= 0.15 for row in result["calibrate"])  # 5 % of 60, and what chance adds
        assert any(row["nothing_certified"] == 1 for row in result["calibrate"] if row["prompts"] < 149)
        medians = {(row["process"], row["risk"]): row["median"] for row in result["crossings"]}
        assert medians["certify", 0.0] == 214
        assert medians["certify", 0.02] is None
        assert medians["alarm", 0.3] < medians["alarm", 0.1] < medians["alarm", 0.05]
        calm, *_, wild = result["streams"]
        assert calm["alarmed_before"] + calm["alarmed_after"] <= 0.15
        assert wild["alarmed_after"] > 0.9
        assert wild["risk_at_end"] < wild["mean_risk_after"] < wild["uncontrolled_after"]

    def test_a_controller_that_ignores_alarms_is_seen(self, script, run, monkeypatch):
        monkeypatch.setattr("kvgraft.fidelity.control.EProcess.exceeds", lambda *_: False)
        _, out = run(script, "--json", "--streams", 5, "--audits", 500, "--served", 1_000)
        wild = json.loads(out)["streams"][-1]
        assert wild["alarmed_after"] == 0
        assert wild["risk_at_end"] == wild["uncontrolled_after"] > 0.02


class TestRiskStreams:
    @pytest.fixture
    def script(self, load):
        return load("risk_streams.py")

    @staticmethod
    def write(path, **losses):
        notches = {"full": [0.0] * 200, **losses}
        path.write_text(json.dumps({"loss": "kl:1", "notches": list(notches), "losses": notches}))
        return path

    def rows(self, script, run, path, *options):
        code, out = run(script, path, "--json", "--streams", 40, "--served", 400, *options)
        assert code == 0
        return json.loads(out)["rows"]

    def test_says_what_was_held(self, script, run, tmp_path):
        path = self.write(tmp_path / "l.json", safe=[0.001] * 200, bold=[0.0, 1.0] * 100)
        few, many = self.rows(script, run, path, "--epsilon", 0.05, "--prompts", 20, 300)
        assert few["nothing_certified"] == 1
        assert few["served_loss"] is None
        assert many["notches"] == {"safe": 1.0}
        assert many["certified_wrongly"] == many["alarmed"] == 0
        assert many["served_loss"] == pytest.approx(0.001)
        assert many["certified_by_audits"] == 1

    def test_a_calibration_that_certifies_everything_is_seen(self, script, run, tmp_path, monkeypatch):
        path = self.write(tmp_path / "l.json", bold=[0.0, 1.0] * 100)
        monkeypatch.setattr(script, "fixed_sequence", lambda p_values, _: len(p_values))
        (row,) = self.rows(script, run, path, "--epsilon", 0.05, "--prompts", 50)
        assert row["certified_wrongly"] == row["alarmed"] == 1
        assert row["served_loss"] < 0.25  # the controller switched it off

    def test_other_files_are_refused(self, script, run, tmp_path):
        path = tmp_path / "l.json"
        path.write_text("{}")
        with pytest.raises(SystemExit, match="no output of 'kvgraft calibrate --json'"):
            run(script, path)


class TestFidelityPairs:
    @pytest.fixture
    def script(self, load):
        return load("fidelity_pairs.py")

    @staticmethod
    def write(path, suite, errors):
        """A file of requests with these errors by setting."""
        names = ("first_kl", "first_flip", "top1", "greedy_equal", "recomputed_share", "flops_share")
        lines = [json.dumps({"arguments": {}})]
        for number, kls in enumerate(zip(*errors.values(), strict=True)):
            settings = {
                label: {"is_grafted": kl > 0, "mean_kl": kl, **dict.fromkeys(names, 0.5)}
                for label, kl in zip(errors, kls, strict=True)
            }
            lines.append(json.dumps({"suite": suite, "index": number, "settings": settings}))
        path.write_text("\n".join(lines) + "\n")
        return path

    @pytest.mark.parametrize("factor", [0.25, 1.0, 3.0])
    def test_ratio_is_that_of_the_same_requests(self, script, run, tmp_path, factor):
        files = []
        for suite, base in (("a", [0.1, 0.4, 0.2, 0.0]), ("b", [3.0, 1.0])):
            errors = {"none": base, "ours": [factor * kl for kl in base]}
            files.append(self.write(tmp_path / f"{suite}.requests.jsonl", suite, errors))
        code, out = run(script, *files, "--json")
        none, ours = json.loads(out)
        assert code == 0
        assert none["n"] == ours["n"] == 5
        assert none["mean_kl"] == pytest.approx(0.94)
        assert none["against"] == {}
        found = ours["against"]["none"]
        assert [found["mean_kl"]["ratio"], *found["mean_kl"]["ci"]] == pytest.approx([factor] * 3)
        assert found["nearer"] == float(factor < 1)
        _, out = run(script, *files)
        assert f"{factor:.2f} [{factor:.2f}, {factor:.2f}]" in out

    def test_draws_all_suites_together(self, script, run, tmp_path):
        errors = {"none": [1.0, 2.0], "query_seam:0.1": [0.5, 0.7], "query_seam:0.1+drift": [0.2, 0.3]}
        picture = tmp_path / "p.png"
        code, _ = run(script, self.write(tmp_path / "a.jsonl", "a", errors), "--plot", picture)
        assert code == 0
        assert picture.read_bytes().startswith(b"\x89PNG")

    def test_files_with_other_settings_are_refused(self, script, tmp_path):
        files = [
            self.write(tmp_path / f"{name}.jsonl", "a", {name: [1.0, 2.0], "none": [1.0, 1.0]}) for name in ("x", "y")
        ]
        with pytest.raises(SystemExit, match="2 lists of settings"):
            script.read(files)
        with pytest.raises(SystemExit, match="no setting z"):
            script.compare(script.read(files[:1]), ["z"], 0)


class TestDriftEstimators:
    ARGS = ("builtin", "--model", "graft-tiny", "--limit", 3, "--max-prompt-tokens", 700, "--dtype", "float32")

    @pytest.fixture
    def script(self, load, monkeypatch):
        script = load("drift_estimators.py")
        # The script adds names to both, for its own process.
        for held in (script.CORRECTIONS, script.fidelity_settings.POLICIES):
            for name in (*script.ESTIMATORS, "mine", "other", script.Layer1Probes.name):
                monkeypatch.setitem(held, name, None)
        return script

    def test_equal_estimators_err_alike_and_a_run_goes_on(self, script, run, tmp_path):
        policies = (
            "none",
            "query_seam:0.2+positions",
            "query_seam:0.2+mine",
            "query_seam:0.2+other",
            "layer1:0.2+mean",
        )
        journal = tmp_path / "j.jsonl"
        given = (*self.ARGS, "--ridge", "mine=0.3,1,16,0,5", "other=2,1,16,0,1", "--journal", journal)
        code, out = run(script, *given, "--policy", *policies)
        assert code == 0
        found = json.loads(out)
        assert {request["suite"] for request in found["requests"]} == {"builtin"}
        for request in found["requests"]:
            errors = request["mean_kl"]
            assert errors["query_seam:0.2+mine"] == errors["query_seam:0.2+positions"]
        rows = {row["setting"]: row for row in found["rows"]}
        assert rows["query_seam:0.2+other"]["mean_kl"] != rows["query_seam:0.2+mine"]["mean_kl"]
        assert rows["layer1:0.2+mean"]["against"]["none"]["mean_kl"]["ratio"] > 0
        measured = journal.read_text()
        assert json.loads(run(script, *given, "--policy", *policies)[1])["rows"] == found["rows"]
        assert journal.read_text() == measured

    def test_probes_of_layer_1_stand_for_their_run(self, script):
        context = SelectionContext(10, np.arange(2, 8), np.arange(6), np.array([0, 1, 8, 9]))
        steps = script.Layer1Probes(ratio=0.3).steps(context)
        assert next(steps).observe_key_deviation
        deviation = np.array([0, 0, 1, 9, 2, 8, 3, 4, 0, 0.0])
        chosen = steps.send(Observation(None, None, deviation))
        assert chosen.positions.tolist() == chosen.sample.tolist() == [3, 5]

    def test_weight_of_a_mean(self, script):
        run = DriftRun(np.arange(4), np.arange(4, 9))
        layout = RunLayout.of([run], torch.device("cpu"))
        moved = torch.arange(8.0).view(4, 1, 2)
        shifts = script.WeightedMean(0.5).for_layer(layout, None)(moved, torch.empty(5, 1, 2))
        assert shifts.tolist() == [[[1.5, 2.0]]] * 5

    def test_nothing_grafted_gets_one_line(self, script, run, monkeypatch):
        record = {"suite": "builtin", "index": 0, "settings": {"none": {"is_grafted": False}}}
        monkeypatch.setattr(script.SuiteRunner, "run", lambda _, __, journal, ___: journal.add(record))
        with pytest.raises(SystemExit, match="nothing was grafted"):
            run(script, *self.ARGS, "--policy", "none")


class TestPassagePatches:
    """Shapes (num_layers, length, num_kv_heads, head_dim): 2, 9, 3, 4."""

    @pytest.fixture
    def script(self, load):
        return load("passage_patches.py")

    @pytest.fixture
    def difference(self):
        return torch.randn(2, 9, 3, 4, generator=torch.Generator().manual_seed(0))

    def test_a_full_rank_keeps_all_and_a_lower_one_its_best_part(self, script, difference):
        one, whole = script.low_rank(difference, (1, 4))
        torch.testing.assert_close(whole, difference)
        singular = torch.linalg.svdvals(difference.transpose(1, 2))
        torch.testing.assert_close(one.square().sum((1, 3)), singular[..., 0].square())
        torch.testing.assert_close(script.low_rank(one, (1,))[0], one)

    def test_a_mean_is_one_vector_for_every_token(self, script, difference):
        found = script.mean(difference)
        torch.testing.assert_close(found[:, 5], difference.mean(1))
        assert found.shape == difference.shape

    def test_scores_are_repaired_better_than_by_the_nearest_keys(self, script, difference):
        queries = torch.randn(2, 3, 7, 4, generator=torch.Generator().manual_seed(1)) * torch.tensor([9.0, 1, 1, 1e-9])

        def left(patch):
            return (queries @ (difference - patch).transpose(1, 2).mT).square().sum((2, 3))

        patch = script.score_patch(difference, queries)
        assert torch.linalg.matrix_rank(patch.transpose(1, 2), rtol=1e-4).max() == 1
        assert (left(patch) < left(script.low_rank(difference, (1,))[0])).all()
        singular = torch.linalg.svdvals(queries @ difference.transpose(1, 2).mT)
        torch.testing.assert_close(left(patch), singular[..., 1:].square().sum(-1), rtol=1e-3, atol=1e-4)

    def test_total_scores_of_every_query_head_become_true(self, script, difference):
        queries = torch.randn(2, 3, 2, 7, 4, generator=torch.Generator().manual_seed(1))
        copied = torch.randn(2, 9, 3, 4, generator=torch.Generator().manual_seed(2))
        patch = script.total_patch(copied + difference, copied, queries, 0.5)

        def totals(keys):
            return (0.5 * queries @ keys.transpose(1, 2)[:, :, None].mT).logsumexp(-1).mean(-1)

        torch.testing.assert_close(totals(copied + patch), totals(copied + difference))
        torch.testing.assert_close(patch[:, :1].expand_as(patch), patch)

    def test_agreement(self, script, difference):
        patches = {"whole": [difference], "nothing": [difference * 0]}
        same = script.Agreement.of([difference], [difference], patches)
        assert same.cosine == pytest.approx(1)
        assert same.explained == pytest.approx({"whole": 1, "nothing": 0})
        assert same.left == pytest.approx({"whole": 0, "nothing": 1})
        assert script.Agreement.of([difference], [-2 * difference], patches).cosine == pytest.approx(-1)


class TestPatches:
    ARGS = ("--model", "graft-tiny", "--split", "all", "--max-prompt-tokens", 1500, "--num-slots", 2000)

    @pytest.fixture
    def script(self, load):
        return load("patches.py")

    @pytest.fixture
    def data(self, tmp_path):
        """Three questions, each with six passages of its own."""
        rng = random.Random(0)
        words = ["river", "stone", "bridge", "winter", "painter", "village", "crossed", "the", "of", "old", "seven"]
        with (tmp_path / "rag.docs.jsonl").open("w") as docs, (tmp_path / "rag.requests.jsonl").open("w") as requests:
            for question in range(3):
                names = [f"{question}/{number}" for number in range(6)]
                for name in names:
                    docs.write(json.dumps({"doc": name, "text": " ".join(rng.choices(words, k=15))}) + "\n")
                parts = [{"text": "Read these."}, *({"doc": name} for name in names), {"text": "Which is it?"}]
                requests.write(json.dumps({"rid": question, "group": f"hotpot{question}", "parts": parts}) + "\n")
        return tmp_path

    def test_the_truth_has_no_error_and_patches_change_it(self, script, run, data):
        journal = data / "patches.jsonl"
        given = (*self.ARGS, "--data", data, "--limit", 2, "--journal", journal)
        code, out = run(script, *given)
        found = json.loads(out)
        rows = {(row["donor"], row["patch"], row["recomputed"]): row for row in found["rows"]}
        assert code == 0
        assert rows["truth", "none", "none"]["mean_kl"] < 1e-7
        errors = [row["mean_kl"] for row in found["rows"][1:]]
        assert min(errors) > 1e-7
        assert len(set(errors)) == len(errors), "no two settings are the same"
        nearest = rows["order", "oracle rank 8", "none"]["of_none"]
        assert nearest["ratio"] < 1
        assert found["agreements"]["order, oracle"]["keys"]["cosine"] == pytest.approx(1, abs=1e-5)
        assert found["agreements"]["order, order"]["keys"]["cosine"] < 0.999
        measured = journal.read_text()
        assert json.loads(run(script, *given)[1]) == found
        assert journal.read_text() == measured

    def test_a_full_patch_is_a_donor_behind_that_front(self, script):
        ours = script.PassageKV(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4))
        theirs = script.PassageKV(ours.keys * 3, ours.values * -3)
        patched = ours + (theirs - ours)
        assert torch.equal(patched.keys, theirs.keys)
        assert torch.equal(patched.values, theirs.values)
        assert not theirs.only_keys().values.any()

    def test_orders_share_no_neighbours(self, script):
        orders = [tuple(range(10))]
        for seed in range(2):
            orders.append(script.apart(random.Random(seed), orders))
        pairs = [set(itertools.pairwise((None, *order))) for order in orders]
        assert all(ours.isdisjoint(theirs) for ours, theirs in itertools.combinations(pairs, 2))

    def test_bytes_of_a_patch(self, script):
        shape = SimpleNamespace(num_kv_heads=3, head_dim=64)
        llm = SimpleNamespace(adapter=SimpleNamespace(pool=SimpleNamespace(layers=[shape] * 30)))
        size = script.patch_bytes(llm, [{"reused_tokens": 128, "num_reused": 1}])
        assert size["kv_bytes_per_token"] == 30 * 3 * 64 * 2 * 2
        assert size["patches"]["rank 2"]["bytes_per_token"] == 30 * 3 * 2 * 2 * 2 * (128 + 64) / 128
        assert size["patches"]["mean"]["bytes_per_token"] == 30 * 3 * 2 * 2 * 64 / 128

    def test_too_few_questions_get_one_line(self, script, run, data):
        with pytest.raises(SystemExit, match="lower --limit"):
            run(script, *self.ARGS, "--data", data, "--limit", 3)


class TestDriftCost:
    def test_every_estimator_is_timed_in_every_part(self, load, run):
        script = load("drift_cost.py")
        code, out = run(script, "--lengths", 200, "--rounds", 2)
        assert code == 0
        rows = json.loads(out)["rows"]
        assert [(row["sample"], row["num_sampled"], row["estimator"]) for row in rows] == [
            (sample, number, name) for sample, number in (("head", 16), ("tenth", 20)) for name in script.ESTIMATORS
        ]
        assert all(row["form"] > 0 and row["all"] > 0 for row in rows)

    def test_medians(self, load):
        timer = load("drift_cost.py").Timer()
        for once, form in ((1, 10), (5, 3), (2, 4)):
            timer.add("once", once / 1e3)
            timer.add("form", form / 1e3)
        assert timer.medians() == {"once": 2, "form": 4, "all": 8}


class TestDonorSubstitution:
    PAIRS = tuple(
        {
            "a": f"The bridge of town {n} is old. It has twelve arches of grey stone and nobody crosses it at night.",
            "b": f"The bridge of town {n} is old. It has seven arches of grey stone and nobody crosses it at night.",
            "question": "How many arches does the bridge have? Answer:",
            "answer_a": "twelve",
            "answer_b": "seven",
        }
        for n in range(2)
    )

    @pytest.fixture
    def script(self, load):
        return load("donor_substitution.py")

    def test_the_baseline_says_what_is_right_for_the_donor(self, script, model_dir):
        """And not what the prompt asks: its K/V are those of the donor's tokens."""
        llm = LLM(model_dir, num_slots=1_000)
        first, second = (llm.tokenize(self.PAIRS[0][key] + self.PAIRS[0]["question"]) for key in "ab")
        with llm.adapter.stock("sdpa") as model:
            taken = script.substituted_answer(model, second, first, llm.eos_token_ids)
        served = llm.generate(first, SamplingParams(script.ANSWER_TOKENS), "off")[0].token_ids
        assert taken == list(served)

    def test_rates(self, script, run, model_dir, tmp_path, monkeypatch):
        pack = tmp_path / "toy.pairs.jsonl"
        pack.write_text("".join(json.dumps(pair) + "\n" for pair in self.PAIRS))
        said = {"full prefill": "seven", "kvgraft": "seven", "donor's K/V": "twelve"}
        texts = iter([said[method] for _ in range(2) for method in said])
        monkeypatch.setattr(script.Subject, "text", lambda *_: next(texts))
        monkeypatch.setattr(script, "split", lambda requests, _: [one for one in requests if one.answers == ("seven",)])
        code, out = run(script, pack, "--model", model_dir, "--json")
        assert code == 0
        rates = {row["method"]: (row["stale"], row["right"], row["n"]) for row in json.loads(out)}
        assert rates == {"full prefill": (0, 1, 2), "kvgraft": (0, 1, 2), "donor's K/V": (1, 0, 2)}

    def test_a_missing_pack_gets_one_line(self, script, monkeypatch, capsys):
        monkeypatch.setattr(sys, "argv", ["donor_substitution", "/nowhere/x"])
        assert script.main() == 2
        assert capsys.readouterr().err.count("\n") == 1


class TestStreams:
    def measure(self, load, monkeypatch, server, **options):
        script = load("bench_streams.py")
        monkeypatch.setattr(script, "CompletionsClient", lambda _: server)
        settings = {"url": "", "only": None, "streams": 4, "rounds": 2, "prefill_tokens": 500, "every": 0.5}
        settings |= {"stream_tokens": 200, "scaling_tokens": 50, "reuse": "off", "vocab": 100, "seed": 0}
        args = SimpleNamespace(**(settings | options))
        return run_in_simulated_time(script.measure("", args))["summary"]

    def test_prompts_slow_streams_down_by_the_time_they_take(self, load, monkeypatch):
        """Streams run for 2 s; beside them a prompt of 0.1 s arrives every 0.5 s and nothing else happens meanwhile."""
        server = SimulatedServer(0.0, prefill_s_per_token=2e-4, tokens=None, token_s=0.01)
        summary = self.measure(load, monkeypatch, server)
        assert summary["tpot_alone_ms"] == pytest.approx(10)
        assert summary["tpot_degradation"] == pytest.approx(0.25, abs=0.06)
        assert summary["prefill_ttft_p50_ms"] == pytest.approx(100, abs=1)
        assert summary["scaling"] == pytest.approx(4)

    def test_prompts_that_cost_nothing_slow_nothing_down(self, load, monkeypatch):
        server = SimulatedServer(0.0, prefill_s_per_token=1e-9, tokens=None, token_s=0.01)
        assert self.measure(load, monkeypatch, server)["tpot_degradation"] == pytest.approx(0, abs=1e-3)

    def test_streams_that_fail_fail_it(self, load, monkeypatch):
        with pytest.raises(SystemExit, match="http 500"):
            self.measure(load, monkeypatch, SimulatedServer(status=500))


def test_soak_kills_and_restarts_a_server_on_the_same_port(load, run, model_dir):
    code, out = run(load("soak.py"), "--model", model_dir, "--requests", 60, "--clients", 4, "--num-slots", 500)
    result = json.loads(out)
    assert (code, result["passed"], result["problems"]) == (0, True, {})
    assert sum(result["requests"].values()) == 60
    assert {"stream", "whole"} <= set(result["requests"])
    assert result["reused_share"] > 0  # how much depends on what fits into how long the server is idle
    assert result["cut_off_by_kill"] > 0
    assert result["served_after_restart"] == 60


def test_soak_says_what_is_wrong(load):
    script = load("soak.py")
    slots = {"free": 5, "request": 1, "cached": 2, "donor": 2, "total": 10}
    assert script.health_problem({"status": "ok", "invariant": "ok", "slots": slots}) is None
    assert "do not add up" in script.health_problem({"status": "ok", "invariant": "ok", "slots": slots | {"free": 4}})
    assert "invariant broken" in script.health_problem({"status": "ok", "invariant": "broken", "slots": slots})
    flat, growing = ([(n, (100 << 20) + n * slope) for n in range(100)] for slope in (0, 1 << 20))
    assert script.memory(flat, 24.0)[1] is None
    assert "grew by 50 MB" in script.memory(growing, 24.0)[1].replace("49 MB", "50 MB")


def test_record_keeps_what_a_benchmark_printed(load, run, monkeypatch, tmp_path):
    script = load("record.py")
    monkeypatch.setattr(script, "_RESULTS", tmp_path)
    code, _ = run(script, "toy", "--", sys.executable, "-c", "print('{\"figure\": 3}')")
    record = json.loads((tmp_path / "toy.json").read_text())
    assert (code, record["result"]) == (0, {"figure": 3})
    assert {"command", "commit", "date", "versions", "machine"} < set(record)
    assert run(script, "failed", "--", sys.executable, "-c", "raise SystemExit(3)")[0] == 3
    assert not (tmp_path / "failed.json").exists()


class TestPrefix:
    def test_events_are_timed_with_and_without_a_log(self, load, run):
        _, out = run(load("prefix/bench_events.py"), "--nodes", 40, "--tokens", 8)
        rows = json.loads(out)
        assert [row["shape"] for row in rows] == ["wide", "deep"]
        assert all(
            row[step][side] > 0
            for row in rows
            for step in ("fill", "evict")
            for side in ("log / bare", "log, us per node")
        )

    def test_host_tier_is_timed_beside_cold_and_device(self, load, run):
        _, out = run(load("prefix/bench_host_tier.py"), "--tokens", 300, "--rounds", 1, "--json")
        result = json.loads(out)
        assert result["cold_over_host"] == pytest.approx(result["cold_ms"] / result["host_ms"])
        assert all(result[f"{kind}_ms"] > 0 for kind in ("cold", "host", "device"))

    def test_a_host_tier_that_forgets_fails_it(self, load, run, monkeypatch):
        monkeypatch.setattr("kvgraft.memory.HostSlots.num_free", property(lambda _: 0))
        with pytest.raises(SystemExit, match="were reused, not 299"):
            run(load("prefix/bench_host_tier.py"), "--tokens", 300, "--rounds", 1)

    def test_hybrid_chat_holds_less_and_answers_the_same(self, load, run):
        options = ("--turns", 5, "--window", 16, "--prompt-tokens", 20, "--output-tokens", 20)
        _, out = run(load("prefix/bench_hybrid_chat.py"), *options)
        result = json.loads(out)
        assert result["tokens_agree"] is True
        assert result["held_at_end"]["hybrid"] < result["held_at_end"]["full"]
        grown = {}
        for name, rows in result["decode"].items():
            grown[name] = rows[-1]["request_bytes"] - rows[0]["request_bytes"]
        assert 0 < grown["hybrid"] < 0.4 * grown["full"]  # one layer of six keeps everything

    def test_hybrid_memory_is_bounded_by_the_window(self, load, run):
        _, out = run(load("prefix/bench_hybrid_memory.py"), "--turns", 4, "--window", 64)
        chat = json.loads(out)["chat"]
        assert [row["tokens"] for row in chat] == sorted({row["tokens"] for row in chat})
        assert max(row["window_tokens"] for row in chat) <= 2 * 64
        assert chat[-1]["share"] < 0.3

    def test_trees_are_timed(self, load, run, monkeypatch):
        """Ours; SGLang's and the memory per node, which takes a process of its own, are left out."""
        script = load("prefix/bench_trees.py")
        trees = {"kvgraft": sys.modules["trees"].KVGraftTree}
        monkeypatch.setattr(script, "available_trees", lambda: trees)
        monkeypatch.setattr(script, "bytes_per_node_apart", lambda *_: 0)
        # With torch loaded a collection takes longer than all that is measured here.
        monkeypatch.setattr(script, "gc", SimpleNamespace(collect=bool, disable=bool, enable=bool))
        monkeypatch.setattr(script, "LENGTHS", {"1K": 1_024, "128K": 4_096})
        _, out = run(script, "--nodes", 100, "--pages", 16, "--quick")
        figures = json.loads(out)["trees"]["kvgraft"]["page 16"]
        for kind in ("1K", "128K", "100 nodes"):
            assert figures[kind]
            assert all(microseconds > 0 for microseconds in figures[kind].values())
        monkeypatch.setattr(trees["kvgraft"], "length_of", lambda *_: 7)
        with pytest.raises(AssertionError):
            run(script, "--nodes", 100, "--pages", 16, "--quick")

    def test_soak_ends_at_the_first_difference(self, load, run, monkeypatch):
        script = load("prefix/soak.py")
        code, out = run(script, "--operations", 4_000)
        assert (code, json.loads(out)["operations"], json.loads(out)["violations"]) == (0, 4_000, 0)
        monkeypatch.setattr(RadixCache, "evict", lambda *_, **__: EvictResult(np.empty(0, np.int64)))
        with pytest.raises(AssertionError):
            run(script, "--operations", 4_000)

    def test_tables_show_the_recorded_results(self, load, capsys):
        script = load("prefix/table.py")
        script.tree_tables()
        script.trace_tables()
        lines = capsys.readouterr().out.splitlines()
        assert len([line for line in lines if line.startswith("|")]) > 40
        assert any("**" in line for line in lines)


class FakeVLLM:
    """Answers as a vLLM server would that serves `share` of every prompt from its cache, `error` nats off.

    A request with reuse off is served nothing, and right; unless `ignores_off`.
    """

    def __init__(self, module, share, error, *, ignores_off=False):
        self.module, self.share, self.error, self.ignores_off = module, share, error, ignores_off

    def stream(self, token_ids, **fields):
        is_cold = "kv_transfer_params" in fields and not self.ignores_off
        cached = 0 if is_cold else int(self.share * len(token_ids))
        logprobs = {str(token): -0.1 * token - (0.0 if is_cold else self.error) for token in range(20)}
        computed = len(token_ids) - cached
        return self.module.Answer(1e-3 * computed, len(token_ids), cached, logprobs, {"computed_tokens": computed})

    complete = stream


class FakeSGLang:
    """Answers as an SGLang server would that reuses half of every prompt, or nothing."""

    def __init__(self, half):
        self.half = half

    def post(self, _path, body):
        return {"meta_info": {"cached_tokens": len(body["input_ids"]) // 2 if self.half else 0}}


class TestEngines:
    """What these scripts make of a server's answers; the servers are in `make test-vllm` and `make test-sglang`."""

    def test_a_model_is_written(self, load, monkeypatch, tmp_path):
        script = load("engines/make_model.py")
        monkeypatch.setattr(script, "_TRAINING_FILES", 2)
        assert script.write_model(tmp_path, 0, 1) > 5e6
        assert (tmp_path / "tokenizer.json").exists()
        assert (tmp_path / "config.json").exists()

    @pytest.mark.parametrize("engine", ["embedded", "vllm", "sglang"])
    @pytest.mark.parametrize("side", ["off", "kvgraft"])
    def test_a_burst_is_asked_in_the_mode_of_its_side(self, load, engine, side):
        script = load("engines/burst_stalls.py")
        asked = json.dumps(script.body_of(engine, [1, 2, 3], side, 8))
        assert ('"off"' in asked, '"graft"' in asked) == (side == "off", side == "kvgraft")
        assert re.search(r'"max_(new_)?tokens": 8\b', asked)

    def test_gaps_of_a_stream_are_compared_round_by_round(self, load):
        script = load("engines/burst_stalls.py")
        assert script.Stream([0.0, 0.1, 0.5, 0.6]).gaps(0.2, 0.4) == [pytest.approx(0.4)]
        figures = {"quiet_ms": 5.0, "burst_s": 2.0, "median_first_token_s": 1.0}
        rows = [
            {"round": number, "side": side, "longest_ms": longest * number, **figures}
            for number in (1, 2, 3)
            for side, longest in (("kvgraft", 30.0), ("off", 20.0))
        ]
        found = script.summary(rows)
        assert (found["longest_times_off"], found["kvgraft"]["longest_ms"]) == (1.5, 60.0)

    def test_requests_about_one_text_are_compared_with_off_of_the_same_round(self, load):
        script = load("engines/one_text.py")
        rows = [
            {
                "round": number,
                "kind": kind,
                "first_p50_s": seconds * number,
                "first_p95_s": 1.5 * seconds * number,
                "all_s": 2 * seconds * number,
            }
            for number in (1, 2, 3)
            for kind, seconds in zip(script.KINDS, (8.0, 4.0, 2.0, 1.0), strict=True)
        ]
        found = script.summary(rows)
        assert [found[kind]["sooner_than_off"] for kind in script.KINDS] == [1, 2, 4, 8]
        assert (found["new"]["first_p50_s"], found["new"]["all_s"]) == (8, 16)
        assert {found[kind]["p95_times_p50"] for kind in script.KINDS} == {1.5}

    def test_a_burst_is_compared_with_off_of_the_same_round(self, load):
        script = load("engines/vllm_burst.py")
        figures = dict.fromkeys(("last_ttft_s", "shifted", "exact", "prompt_tokens"), 1)
        rows = [
            {"variant": variant, "round": number, "seconds": seconds * number, "median_ttft_s": seconds, **figures}
            for number in (1, 2, 3)
            for variant, seconds in zip(script.VARIANTS, (8.0, 4.0, 2.0, 1.0), strict=True)
        ]
        found = script.summary(rows)
        assert [found[each]["seconds_sooner_than_off"] for each in script.VARIANTS] == [1, 2, 4, 8]
        assert found["wait"]["seconds"] == 8

    @pytest.mark.parametrize(("share", "error"), [(0.0, 0.0), (0.8, 0.5)])
    def test_vllm_rows_tell_reuse_from_none(self, load, share, error):
        script = load("engines/vllm_ttft.py")
        rounds = script.Rounds(FakeVLLM(script, share, error), "none", random.Random(0))
        row = rounds.row(1_024, repeats=2)
        assert row.speed_up == pytest.approx(1 / (1 - share), rel=0.01)
        assert max(row.gaps) == pytest.approx(error)
        assert row.computed_tokens == 1_024 - int(share * 1_024)
        assert row.as_json()["speed_up"] == round(row.speed_up, 2)
        assert f"**{row.speed_up:.1f}x**" in script.markdown([row])
        # An exact hit of whole blocks, in front of as many tokens as the reuse has computed: 7 blocks and 205 tokens.
        assert row.head_s == pytest.approx([1.101] * 2 if share else [])

    def test_vllm_that_reuses_with_reuse_off_fails_it(self, load):
        script = load("engines/vllm_ttft.py")
        rounds = script.Rounds(FakeVLLM(script, 0.8, 0.5, ignores_off=True), "none", random.Random(0))
        with pytest.raises(script.ServerError, match="with reuse off was answered with 819 cached tokens"):
            rounds.row(1_024, repeats=1)

    def test_sglang_rows_tell_reuse_from_none(self, load):
        script = load("engines/sglang_ttft.py")
        rows = script.measure({"stock": FakeSGLang(half=False), "kvgraft": FakeSGLang(half=True)}, 300, 1)
        cached = {(row["server"], row["prompt"]): row["cached_tokens"] for row in rows}
        assert len(cached) == 8
        assert cached["stock", "shifted"] == 0
        assert cached["kvgraft", "shifted"] == (47 + 300 + 20) // 2

    def test_sglang_that_was_restarted_is_compared_with_cold(self, load):
        script = load("engines/sglang_restart.py")
        documents = [script.words(random.Random(number), 300) for number in range(2)]
        rows = script.measure(FakeSGLang(half=True), documents, random.Random(0))
        assert [row["prompt"] for row in rows] == ["cold", "restarted", "at hand"]
        assert {row["cached_tokens"] for row in rows} == {(30 + 300 + 20) // 2}

    def test_vllm_that_was_restarted_is_compared_with_cold(self, load, monkeypatch):
        script = load("engines/vllm_restart.py")
        monkeypatch.setattr(script.time, "sleep", lambda _: None)
        documents = [script.words(random.Random(number), 300) for number in range(3)]
        known = {tuple(document) for document in documents}

        def stream(prompt):
            is_known = tuple(prompt[30:330]) in known
            return SimpleNamespace(seconds=0.1 if is_known else 0.4, cached_tokens=300 * is_known)

        rows = script.measure(SimpleNamespace(stream=stream), documents, random.Random(99))
        assert [(row["prompt"], row["speedup"]) for row in rows] == [
            ("cold", 1.0),
            ("restarted", 4.0),
            ("at hand", 4.0),
        ]
        assert [row["cached_tokens"] for row in rows] == [[0] * 3, [300] * 3, [300] * 3]

    def test_sglang_answers_are_compared_token_by_token(self, load):
        script = load("engines/sglang_rag.py")
        truth = [{"tokens": [1, 2, 3, 4], "cached": 0, "ttft_ms": 10.0}] * 2
        other = [truth[0] | {"cached": 5}, {"tokens": [1, 2, 9, 9], "cached": 0, "ttft_ms": 20.0}]
        row = script.summary("x", [[0] * 10, [0] * 10], other, truth)
        figures = ("reused_percent", "same_first_token_percent", "same_tokens_percent", "same_answer_percent")
        assert [row[name] for name in figures] == [25.0, 100.0, 75.0, 50.0]
        assert (row["without_reuse"], row["ttft_without_reuse_over_stock"]) == (2, 1.5)
        hit = script.summary("x", [[0] * 20, [0] * 20], [truth[0] | {"cached": 16}, other[1]], truth)
        assert (hit["without_reuse"], hit["ttft_without_reuse_over_stock"]) == (1, 2.0)

    @pytest.mark.parametrize("slowdown", [0.5, 1.0, 2.0])
    def test_two_commits_are_compared_round_by_round(self, load, slowdown):
        script = load("engines/two_commits.py")
        asked = {side: [] for side in script.SIDES}

        def asker(side, factor):
            def ask(prompt):
                asked[side].append(prompt)
                return factor * (10 + len(asked[side])), len(prompt) // 2

            return ask

        sides = {"before": asker("before", 1.0), "after": asker("after", slowdown)}
        rows = script.measure(sides, 1_000, 4, random.Random(0))
        assert asked["before"] == asked["after"]
        assert [row["kind"] for row in rows] == ["moved", "again", "unknown"]
        for row in rows:
            assert row["ratio"] == pytest.approx(slowdown)
            assert row["ratio_ci"] == pytest.approx([slowdown, slowdown])
            assert row["after_cached_tokens"] == 500
            assert row["rounds"] == 4

    def test_the_embedded_engine_is_compared_with_itself(self, load):
        script = load("engines/two_commits.py")
        tree = BENCHMARKS.parent
        with script.embedded_sides(dict.fromkeys(script.SIDES, tree), SimpleNamespace(model="graft-tiny")) as sides:
            rows = script.measure(sides, 800, 1, random.Random(0))
        cached = {row["kind"]: (row["before_cached_tokens"], row["after_cached_tokens"]) for row in rows}
        assert cached["unknown"] == (0, 0)
        assert cached["moved"][0] == cached["moved"][1] > 0
        assert cached["again"][0] == cached["again"][1] > 700

    def test_two_commits_need_a_checkout(self, load, tmp_path):
        script = load("engines/two_commits.py")
        with pytest.raises(SystemExit, match="no checkout of kvgraft"):
            script.environment(tmp_path)

    @pytest.mark.parametrize("sooner", [0.5, 2.0])
    def test_bursts_are_compared_with_the_same_round_without_a_graft(self, load, sooner):
        script = load("engines/vllm_burst.py")

        def row(variant, number, seconds):
            times = {"seconds": seconds, "median_ttft_s": 2 * seconds, "last_ttft_s": 1.0}
            return {"variant": variant, "round": number, **times, "shifted": 7, "exact": 5, "prompt_tokens": 9}

        rows = [row("off", number, off) for number, off in enumerate((1.0, 4.0, 9.0))]
        rows += [row(variant, off["round"], off["seconds"] / sooner) for off in rows for variant in script.VARIANTS[1:]]
        found = script.summary(rows)
        assert found["off"]["seconds_sooner_than_off"] == 1
        assert found["wait"]["seconds_sooner_than_off"] == found["wait"]["median_ttft_s_sooner_than_off"] == sooner
        assert (found["void"]["seconds"], found["void"]["shifted"]) == (4 / sooner, 7)

    OFF: ClassVar = {3: -0.5, 7: -1.0, 9: -2.0}

    @pytest.mark.parametrize(
        ("refusal", "copied", "again", "state"),
        [
            ("", 390, OFF, "grafts"),
            ("no", 0, OFF, "stands aside"),
            ("", 10, OFF, "copies nothing"),
            ("", 390, {3: -0.5, 7: -1.01, 9: -2.0}, "wrong"),
            ("no", 0, {3: -0.6, 7: -1.0}, "wrong"),
            ("", 390, {11: -0.1}, "wrong"),
        ],
    )
    def test_a_family_is_grafted_only_if_tokens_are_copied_and_the_answer_is_that_of_a_full_prefill(
        self, load, refusal, copied, again, state
    ):
        found = load("engines/families.py").verdict(refusal, "query_seam", copied, self.OFF, again)
        assert found["state"] == state
        assert bool(found["reason"]) == (state != "grafts")

    @pytest.mark.parametrize("logprob", [float("nan"), -6.93])
    def test_a_model_that_the_engine_has_not_loaded_whole_says_nothing_about_grafts(self, load, logprob):
        off = dict.fromkeys(range(5), logprob)
        assert load("engines/families.py").verdict("", "query_seam", 390, off, off)["state"] == "not tried"

    def test_families_are_tried_each_in_a_process_that_may_die(self, load, run, monkeypatch):
        script = load("engines/families.py")
        code, printed = run(script, "embedded", "--families", "Qwen3", "DeepSeek V2")
        found = json.loads(printed)["families"]
        assert (code, found["Qwen3"]["state"], found["DeepSeek V2"]["state"]) == (0, "grafts", "not served")
        assert "latent attention" in found["DeepSeek V2"]["reason"]
        monkeypatch.setattr(script, "__file__", "gone.py")
        died = script.in_a_process("embedded", "Qwen3")
        assert died["state"] == "not tried"
        assert "gone.py" in died["reason"]

    def test_the_page_of_models_is_that_of_the_records(self, load, run):
        code, printed = run(load("engines/families.py"), "page")
        assert (code, printed) == (0, (BENCHMARKS.parent / "docs/models.md").read_text())
        assert "wrong" not in printed

    def test_values_of_a_step_are_compared_prompt_by_prompt(self, load):
        script = load("engines/phase_cost.py")

        def replies(*seconds):
            return [script.Reply(each, 100, 50, "a") for each in seconds]

        found = script.summary({"off": replies(1.0, 2.0, 9.0), "32": replies(1.0, 1.0, 1.0)})
        assert (found["off"]["sooner"], found["32"]["sooner"], found["32"]["mean_s"]) == (1, 2, 1)
        assert found["32"]["reused_share"] == 0.5

    def test_peers_have_help(self, load, run):
        script = load("peers/peers_ttft.py")
        with pytest.raises(SystemExit) as stop:
            run(script, "--help")
        assert stop.value.code == 0

    def test_smollm2_is_cut_to_its_first_layer(self, load, monkeypatch, tmp_path):
        if smollm2_path() is None:
            pytest.skip("SmolLM2 is not installed")
        from gguf import GGUFReader

        script = load("engines/make_smollm2.py")
        script.write_gguf(smollm2_path(), tmp_path / "cut.gguf", 1)
        reader, whole = GGUFReader(tmp_path / "cut.gguf"), GGUFReader(smollm2_path())
        assert reader.fields["llama.block_count"].contents() == 1
        tensors = {tensor.name: tensor.data for tensor in whole.tensors}
        kept = {tensor.name: tensor.data for tensor in reader.tensors}
        assert script.GGUF_NAME == load("peers/suite_peer_servers.py").GGUF_NAME
        assert set(kept) == {name for name in tensors if not name.startswith("blk.") or name.startswith("blk.0.")}
        assert all(np.array_equal(kept[name], tensors[name]) for name in kept)

    def test_selection_of_dynamo_has_help(self, load, run):
        """What it answers is tested where its package is (tests/integration/dynamo)."""
        with pytest.raises(SystemExit) as stop:
            run(load("engines/dynamo_selection.py"), "--help")
        assert stop.value.code == 0

    def test_routing_counts_what_was_reused_and_what_failed(self, load):
        script = load("routing.py")
        done = [script.Outcome(i, f"w{i % 2}", 10.0 * (i + 1), 100, 20 * i, 10, "text") for i in range(3)]
        row = script.summary("reuse", [*done, script.Outcome(3, "w1", 0.0, 100, 100, 0, "", "worker_failed")])
        figures = ("requests", "failed", "exact_percent", "shifted_percent", "reused_percent", "ttft_median_ms")
        assert [row[name] for name in figures] == [4, 1, 20.0, 10.0, 30.0, 20.0]
        assert row["by_worker"] == {"w0": 2, "w1": 1}
        assert not {"choices", "held", "cached_percent"} & set(row)

    def test_routing_tells_who_was_chosen_and_what_servers_count(self, load):
        script = load("routing.py")
        done = [
            script.Outcome(i, f"w{i % 2}", 1.0, 100, 0, 0, "", cached_tokens=50, held=((0, i), (7, 0)))
            for i in range(3)
        ]
        row = script.summary("reuse", done, ["w0", "w1"], {"exact": 30.0, "shifted": 60.0})
        assert (row["choices"], row["held"][2]) == ([0, 1, 0], ((0, 2), (7, 0)))
        assert [row[name] for name in ("exact_percent", "shifted_percent", "cached_percent")] == [10.0, 20.0, 50.0]

    def test_routing_hears_of_first_tokens_and_reads_both_engines_answers(self, load):
        """A stream of vLLM's tells its usage, one of ours a report; one that breaks off has begun."""
        script = load("routing.py")
        ours, theirs = (
            {"kvgraft": {"exact_tokens": 1, "shifted_tokens": 2}},
            {"prompt_tokens_details": {"cached_tokens": 9}},
        )

        async def answer(request):
            asked = await request.json()
            response = web.StreamResponse(headers={"x-kvgraft-worker": "w"})
            await response.prepare(request)
            for event in (
                {"choices": [{"text": "a"}]},
                {"choices": [{"text": "b"}], "usage": None, **ours},
                {"error": {"code": "worker_failed"}} if asked["n"] == 2 else {"choices": [], "usage": theirs},
            ):
                await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            return response

        async def played():
            app = web.Application()
            app.router.add_post("/v1/completions", answer)
            runner = web.AppRunner(app)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
            heard = []
            stream = script.Stream(
                lambda _: url,
                lambda i: {"n": i},
                1,
                lambda *told: heard.append(told),
                lambda prompt: ((len(prompt), 0),),
            )
            try:
                return await stream.play([[5] * 4] * 3), heard
            finally:
                await runner.cleanup()

        outcomes, heard = asyncio.run(played())
        assert heard == [("w", 0), ("w", 1), ("w", 2)]
        assert [(o.exact_tokens, o.shifted_tokens, o.cached_tokens) for o in outcomes] == [
            (1, 2, 9),
            (1, 2, 9),
            (1, 2, 0),
        ]
        assert [(o.text, o.failure, o.began) for o in outcomes[1:]] == [
            ("ab", None, True),
            ("ab", "worker_failed", True),
        ]
        assert outcomes[0].held == ((4, 0),)

    def test_replicas_that_share_forget_what_is_stored(self, load, monkeypatch):
        script = load("replicas.py")
        begun, ended = [], []

        class Fake:
            def __init__(self, arguments, port):
                begun.append((port, dict(itertools.pairwise(arguments))))

            def __enter__(self):
                return self

            def __exit__(self, *_):
                ended.append(self)

        monkeypatch.setattr(script, "ServerProcess", Fake)
        forgotten, slept = [], []
        monkeypatch.setattr(script, "post", forgotten.append)
        replicas = script.Replicas("m", 2, 17_000, ["--num-slots", "9"], share=True)
        replicas.start()
        folder = Path(replicas.store().removeprefix("file:")) / "space"
        folder.mkdir(parents=True)
        (folder / "old.safetensors").touch()
        late = folder / "late.safetensors"
        monkeypatch.setattr(script.time, "sleep", lambda _: slept.append(0) or (len(slept) == 1 and late.touch()))
        replicas.reset()
        assert not list(folder.iterdir())
        assert len(slept) == 2
        assert [url.rsplit(":", 1)[0] for url in forgotten] == ["http://127.0.0.1"] * 2
        replicas.stop()
        assert not folder.exists()
        assert (len(begun), len(ended)) == (2, 2)
        assert [options["--store"] for _, options in begun] == [f"file:{folder.parent}"] * 2
        ports = [port for port, _ in begun[:2]] + [
            json.loads(options["--kv-events"])["endpoint"] for _, options in begun[:2]
        ]
        assert len(set(ports)) == 4
        assert replicas.worker(1).startswith(replicas.urls[1])
        script.Replicas("m", 1, 17_000)._begun(0)
        assert "--store" not in begun[-1][1]

    def test_vllm_replicas_announce_donors_and_are_counted_by_their_metrics(self, load, monkeypatch, tmp_path):
        load("replicas.py")
        script = load("engines/vllm_replicas.py")
        begun = []

        class Fake:
            def __init__(self, settings):
                begun.append(settings)

            def __enter__(self):
                return self

        monkeypatch.setattr(script, "VLLMServer", Fake)
        replicas = script.VLLMReplicas(tmp_path, "DIR", 2, 17_000)
        replicas.start()
        command = begun[1].command()
        events = json.loads(command[command.index("--kv-events-config") + 1])
        assert events["enable_kv_cache_events"] is True
        assert events["endpoint"].rsplit(":", 1)[1] == replicas.events(1).rsplit(":", 1)[1]
        connector = json.loads(command[command.index("--kv-transfer-config") + 1])
        assert connector["kv_connector_extra_config"]["announce_donors"] is True
        assert "store" not in connector["kv_connector_extra_config"]
        metrics = (
            b"# HELP kvgraft:prompt_tokens_total x\n"
            b'kvgraft:prompt_tokens_total{engine="0",kind="prefix",outcome="exact"} 3.0\n'
            b'kvgraft:prompt_tokens_total{engine="0",kind="prefix",outcome="approx"} 4.0\n'
            b'kvgraft:prompt_tokens_total{engine="0",kind="segment",outcome="approx"} 1e2\n'
            b'kvgraft:prompt_tokens_total{engine="0",kind="fresh",outcome="exact"} 5.0\n'
        )
        monkeypatch.setattr(script, "post", lambda *_: b"")
        monkeypatch.setattr(script.time, "sleep", lambda _: None)
        monkeypatch.setattr(script.urllib.request, "urlopen", lambda *_, **__: io.BytesIO(metrics))
        assert replicas.reused() == {"exact": 14.0, "shifted": 200.0}
        assert replicas.fields("graft", 1) == replicas.fields("graft", 2)
        assert replicas.fields("off", 1)["cache_salt"] != replicas.fields("off", 2)["cache_salt"]

    def test_lookup_for_the_peer_is_python(self, tmp_path):
        """Its package is not here."""
        py_compile.compile(str(BENCHMARKS / "peers/exact_runs.py"), str(tmp_path / "compiled"), doraise=True)


class TestDriftStream:
    def test_shares_are_of_what_is_there_and_healing_brings_it_nearer(self, load, run):
        script = load("drift_stream.py")
        sizes = ("--requests", 24, "--documents", 5, "--lengths", 30, 60, "--novel", 0.5, "--windows", 2)
        code, out = run(script, *sizes, "--idle", 0.9, "--json")
        result = json.loads(out)
        assert code == 0
        last = {name: result[name]["windows"][-1] for name in script.ARMS}
        for shares in last.values():
            assert 0 <= shares["exact"] <= shares["near"] <= shares["any"] <= 1
        assert last["oracle"]["exact"] == last["oracle"]["any"] > 0
        assert last["none"]["exact"] < last["healing"]["exact"] <= last["oracle"]["exact"]
        assert result["none"]["healed_tokens"] == 0 < result["healing"]["healed_tokens"]

    def test_streams_are_drawn_from_the_seed(self, load):
        script = load("drift_stream.py")
        traffic = script.Traffic(5, 4, 2, 0.5, (20, 30), 1)
        first, again = list(traffic.prompts(500)), list(traffic.prompts(500))
        assert all(map(np.array_equal, first, again))
        other = list(script.Traffic(5, 4, 2, 0.5, (20, 30), 2).prompts(500))
        assert not any(map(np.array_equal, first, other))


class TestStores:
    def test_killed_writers_lose_nothing(self, tmp_path):
        """In a process of its own: it forks."""
        command = [sys.executable, str(BENCHMARKS / "store_crash.py"), "--puts", "20", "--dir", str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        result = json.loads(done.stdout)
        assert result["acknowledged"] >= 20
        assert result["kills"] > 0
        assert not any(result[name] for name in ("lost", "torn", "wrong", "temporary_files_left"))
        assert not list(tmp_path.iterdir())

    def test_soak_survives_its_faults(self, load, run, tmp_path):
        code, out = run(load("store_soak.py"), "--operations", 1_500, "--dir", tmp_path)
        result = json.loads(out)
        assert (code, result["violations"]) == (0, {})
        assert result["done"]["hits"] > 50
        assert sum(result["faults_on_the_way"].values()) > 20
        assert sum(result["faults_of_the_system"].values()) > 5

    def test_soak_notices_wrong_bytes(self, load, run, tmp_path, monkeypatch):
        """As if pages were not verified."""
        script = load("store_soak.py")
        comparing = SimpleNamespace(**{name: getattr(np, name) for name in ("empty", "uint8", "inf")})
        comparing.array_equal = lambda *_: True
        monkeypatch.setattr("kvgraft.memory.store.tier.reader.np", comparing)
        code, out = run(script, "--operations", 3_000, "--dir", tmp_path)
        assert code == 1
        assert "WRONG BYTES WERE SERVED" in json.loads(out)["violations"]

    def test_a_catalogue_comes_back(self, load, run, tmp_path):
        code, out = run(load("store_scan.py"), "--donors", "30", "--repeats", 1, "--dir", tmp_path)
        (row,) = json.loads(out)["catalogue"]
        assert (code, row["donors"]) == (0, 30)
        assert 0 < row["first_donor_usable_s"] <= row["all_s"]
        assert row["longest_step_ms"] > 0

    def test_bandwidth_is_told_beside_the_medium(self, load, run, tmp_path, monkeypatch):
        script = load("store_bandwidth.py")
        monkeypatch.setattr(script, "DONOR_TOKENS", 700)
        monkeypatch.setattr(script, "never_reuse_memory", bool)
        monkeypatch.setattr(script, "prefill_tokens_per_s", lambda _: 1e-3)
        options = (
            "--rows",
            "graft-tiny float32",
            "--spans",
            "300,600",
            "--repeats",
            2,
            "--dir",
            tmp_path,
            "--model",
            "x",
        )
        code, out = run(script, *options)
        result = json.loads(out)
        (line,) = result["stores"]["file"]
        assert (code, [span["tokens"] for span in line["spans"]]) == (0, [300, 600])
        for span in line["spans"] + line["cold"]:
            assert span["tier_over_plain_wall"] == pytest.approx(span["tier_wall_ms"] / span["plain_wall_ms"], rel=0.2)
        assert result["break_even_tokens"] == {"file": 1}, "a model that slow is slower than any file"

    def test_bandwidth_of_wrong_bytes_is_none(self, load, run, tmp_path, monkeypatch):
        script = load("store_bandwidth.py")
        monkeypatch.setattr(script, "DONOR_TOKENS", 300)
        monkeypatch.setattr(script, "never_reuse_memory", bool)
        monkeypatch.setattr(script.FileMedium, "plain", lambda *_: None)
        monkeypatch.setattr(script.np, "empty", np.zeros)
        with pytest.raises(SystemExit, match="the medium gave wrong bytes"):
            run(script, "--rows", "graft-tiny float32", "--spans", "200", "--repeats", 1, "--dir", tmp_path)


class TestSemanticDiscovery:
    @pytest.fixture
    def script(self, load, monkeypatch):
        script = load("semantic/discovery.py")
        monkeypatch.setattr(script, "SEARCHED", (50, 200))
        monkeypatch.setattr(script, "LENGTHS", (64, 512))
        toy = {
            "CATALOGUE_TOKENS": 20_000,
            "DONOR_TOKENS": 500,
            "PIECES": (32, 256),
            "PROMPTS": 3,
            "PROMPT_TOKENS": 1_024,
        }
        for name, value in toy.items():
            monkeypatch.setattr(script, name, value)
        return script

    @staticmethod
    def quality(out):
        return {(row["suite"], row["embedder"]): row for row in json.loads(out)["quality"]}

    def test_tells_what_is_found(self, script, run):
        code, out = run(script, "--embedders", "minhash,tfidf", "--questions", 12, "--only", "quality")
        found = self.quality(out)
        assert code == 0
        assert {suite for suite, _ in found} == {
            "rag",
            "edited",
            "xtemplate",
            "paraphrased",
            "contradicting",
            "unrelated",
        }
        assert found["rag", "minhash"]["recall"] > 0.9
        assert found["xtemplate", "minhash"]["recall"] == 1
        assert found["paraphrased", "minhash"]["recall"] < 0.75, "sketches see tokens, not what they mean"
        assert found["unrelated", "tfidf"]["recall"] is None
        edited = found["edited", "tfidf"]
        assert sum(bucket["prompts"] for bucket in edited["buckets"].values()) == edited["proposals"] == 12
        assert edited["false_proposals"] == 0

    def test_an_embedder_that_sees_nothing_finds_nothing(self, script, run, monkeypatch):
        monkeypatch.setattr(
            "kvgraft.semantic.MinHashSketch.embed", lambda self, texts: np.eye(1, self.dimensions, dtype=np.float32)
        )
        _, out = run(script, "--embedders", "minhash", "--questions", 12, "--only", "quality")
        rag = self.quality(out)["rag", "minhash"]
        assert rag["recall"] < 0.3
        assert rag["false_proposals"] > 0.5

    def test_costs_and_proposals(self, script, run):
        _, out = run(script, "--embedders", "minhash", "--only", "cost")
        result = json.loads(out)
        assert all(
            value > 0 for row in result["cost"] + result["search"] for value in row.values() if value != "minhash"
        )
        _, out = run(script, "--embedders", "minhash", "--only", "proposals")
        rows = {(row["indexes"], row["piece_tokens"]): row for row in json.loads(out)["proposals"]}
        assert all(rows["full", size]["found_alone"] > 0.99 for size in script.PIECES)
        assert all(rows["lost", size]["found_alone"] == 0 for size in script.PIECES)
        assert rows["lost", 256]["found_with_proposals"] > 0

    def test_an_unknown_embedder_gets_one_line(self, script, monkeypatch, capsys):
        monkeypatch.setattr(sys, "argv", ["discovery", "--embedders", "qqq"])
        assert script.main() == 2
        assert capsys.readouterr().err.startswith("discovery: unknown embedder 'qqq'")


class TestWarmRestart:
    @pytest.fixture
    def script(self, load):
        return load("warm_restart.py")

    @pytest.mark.parametrize("front", [(), ("--same-front",)])
    def test_a_killed_server_is_asked_again(self, script, run, tmp_path, front):
        options = ("--server-args", "--model graft-tiny", "--tokens", 600, "--runs", 1, "--vocab", 4_000, *front)
        code, out = run(script, "--json", *options, "--folder", tmp_path)
        assert code == 0
        result = json.loads(out)
        (found,) = result["runs"]
        assert found["tokens"] == 600
        assert found["cold_s"] > 0
        assert found["warm_s"] > 0
        assert (found["reused_tokens"] == 600 - 32) is bool(front), "behind the same front nothing is left out"
        assert "folder" not in result["settings"]
        assert result["summary"]["600"]["times_sooner"] == pytest.approx(found["cold_s"] / found["warm_s"])

    def test_medians_are_of_runs_of_one_length(self, script):
        runs = [
            script.Run(tokens, cold, 1.0, 0.0, 50, {}) for tokens, cold in ((100, 5), (100, 7), (200, 9), (100, 90))
        ]
        summary = script.summarise(runs)
        assert {tokens: figures["cold_s"] for tokens, figures in summary.items()} == {"100": 7, "200": 9}
        assert summary["100"]["times_sooner"] == 7
        assert summary["100"]["reused_share"] == 0.5


class TestTwoReplicas:
    def test_sharing_finds_what_the_other_has_read(self, load, run, tmp_path, monkeypatch):
        """The stream deals every document to both engines in turn; seen through the store at once, for the test."""
        monkeypatch.setattr("kvgraft.reuse.reads._LEAST_PATIENCE_S", 60.0)
        monkeypatch.setattr("kvgraft.engine.schedule.pace.Pace.flops_per_s", None)
        generate = LLM.generate

        def behind_stores(llm, *args, **kwargs):
            llm.sync_stores(60.0)
            output = generate(llm, *args, **kwargs)
            llm.sync_stores(60.0)
            return output

        monkeypatch.setattr(LLM, "generate", behind_stores)
        rng = random.Random(0)
        documents = ["".join(rng.choice("abcdefgh ,.\n") for _ in range(500)) for _ in range(2)]
        lines = [{"input": f"question {number}: {documents[number // 2 % 2]}"} for number in range(4)]
        (tmp_path / "pack.jsonl").write_text("\n".join(map(json.dumps, lines)))
        _, out = run(
            load("two_replicas.py"), tmp_path / "pack", "--json", "--model", "graft-tiny", "--num-slots", 8_000
        )
        summary = json.loads(out)["summary"]
        assert summary["two apart"]["reused_share"] < 0.1 < summary["one"]["reused_share"]
        assert summary["two sharing"]["from_store_share"] > 0.3
        assert summary["two apart"]["from_store_share"] == summary["one"]["from_store_share"] == 0


class TestStructured:
    @pytest.fixture
    def script(self, load, monkeypatch):
        script = load("structured.py")
        names = ("optional", "array", "any of")
        monkeypatch.setattr(script, "SCHEMAS", {name: script.SCHEMAS[name] for name in names})
        monkeypatch.setattr(script, "HARD", {"50 levels": script.HARD["50 levels"]})
        return script

    def test_masks_allow_what_is_of_a_schema(self, script, run):
        _, out = run(script, "masks", "--model", bundled_model_path(), "--texts", 1)
        found = json.loads(out)["libraries"]["llguidance"]
        assert found["twenty"]["masks"] > 3
        assert found["hard"]["50 levels"]["masks"] > 50
        assert found["twenty"]["refused"] == found["hard"]["50 levels"]["refused"] == 0

    def test_a_library_that_allows_too_little_is_seen(self, script, run, monkeypatch):
        nothing = np.zeros(4_096 // 8, np.uint8)
        monkeypatch.setattr(script.LLGuidance, "mask", lambda *_: nothing)
        _, out = run(script, "masks", "--model", bundled_model_path(), "--texts", 1)
        assert json.loads(out)["libraries"]["llguidance"]["twenty"]["refused"] == 3

    def test_answers_are_validated(self, script, run):
        code, out = run(script, "answers", "--requests", 9, "--max-tokens", 100)
        result = json.loads(out)
        assert (code, result["invalid"], result["valid"] + result["cut"]) == (0, 0, 9)
        assert result["valid"] >= 3

    def test_answers_that_are_not_valid_fail_it(self, script, run, monkeypatch):
        monkeypatch.setattr(
            script, "_run", lambda *_: [SimpleNamespace(finish_reason="stop", text="{", token_ids=(1,))]
        )
        code, out = run(script, "answers", "--requests", 1)
        assert (code, json.loads(out)["invalid"]) == (1, 1)

    def test_streams_take_turns(self, script, run, monkeypatch):
        monkeypatch.setattr(script, "SCHEMAS", {"person": {"type": "string", "minLength": 5}})
        _, out = run(script, "streams", "--rounds", 1, "--tokens", 4)
        result = json.loads(out)
        assert set(result["tokens_per_s"]) == set(result["rounds"]) == {"free", "structured"}
        assert result["ratio"]["cpu"] > 0


class TestVerified:
    TOY = (
        "--tokens",
        5,
        "--shortest",
        60,
        "--longest",
        140,
        "--num-slots",
        700,
        "--max-rows",
        64,
        "--preemptions",
        0.1,
    )

    @pytest.fixture
    def script(self, load):
        return load("verified.py")

    def test_answers_are_compared_and_kept(self, script, run, tmp_path):
        state = tmp_path / "state.jsonl"
        options = (*self.TOY, "--state", state, "--aborts", 0.5)
        code, out = run(script, "builtin:instructions", "builtin:sessions", "--prompts", 12, *options)
        result = json.loads(out)
        assert (code, result["problems"], result["differences"]) == (0, {}, [])
        assert result["prompts"] == result["equal"] == 12
        assert result["drafted_tokens"] >= result["retracted_tokens"]
        assert 0 < result["with_graft"] <= 12
        assert 0 < result["with_drafts"] <= 12
        assert result["disturbances"]["aborts"] > 0
        assert {kind: row["prompts"] for kind, row in result["by_kind"].items()} == {
            "builtin:instructions": 6,
            "builtin:sessions": 6,
        }
        assert len(state.read_text().splitlines()) == 12
        lines = state.read_text().splitlines()
        state.write_text("\n".join(lines[:11]) + "\n")
        _, out = run(script, "builtin:instructions", "builtin:sessions", "--prompts", 12, *options)
        assert json.loads(out)["prompts"] == 12, "a run that was cut off goes on"
        assert [json.loads(line)["index"] for line in state.read_text().splitlines()[11:]] == [
            json.loads(lines[11])["index"]
        ]

    @pytest.mark.usefixtures("looks_are_free")
    def test_drafts_that_nobody_verifies_are_seen(self, script, run, monkeypatch):
        """Wrong drafts, and all of them are believed. A preempted request would lose its drafts, and answer right."""
        receive = Drafts.receive

        def believe(drafts, output, sampler):
            def sample(logits):
                index = max(0, drafts.frontier + 1 - drafts.prompt_len)
                return drafts.token_ids[index] if index < len(drafts.token_ids) else sampler.sample(logits)

            return receive(drafts, output, SimpleNamespace(sample=sample))

        monkeypatch.setattr(Drafts, "receive", believe)
        monkeypatch.setattr(Sampler, "fork", lambda _: SimpleNamespace(sample=lambda logits: int(logits.argmin())))
        undisturbed = ("--sampled", 0, "--aborts", 0, "--preemptions", 0)
        code, out = run(script, "builtin:edits", "--prompts", 6, *self.TOY, *undisturbed)
        result = json.loads(out)
        assert code == 1
        assert result["equal"] == result["prompts"] - result["with_drafts"] < result["prompts"] == 6
        assert all(row["first_difference"]["margin"] > 0 for row in result["differences"])

    def test_a_stream_that_retracts_too_much_is_seen(self, script):
        asked = script.Asked(0, "verified", SimpleNamespace(provisional=True))
        parts = [(7, True, 0), (8, True, 0), (9, True, 1), (7, False, 0), (9, False, 0)]
        problems = [asked.take(StreamPart("", t, is_provisional=p, num_retracted=n)) for t, p, n in parts]
        assert problems == [None] * 5
        assert (asked.tokens, list(asked.provisional)) == ([7, 9], [])
        assert asked.take(StreamPart("", 1, num_retracted=1)) == "more tokens are retracted than are outstanding"

    def test_sources_are_mixed_in_turn(self, load):
        mixed = load("mixed_prompts.py").mixed_prompts(["builtin:edits", "builtin:sessions"], 9, 0)
        assert [prompt.kind for prompt in mixed[:4]] == ["builtin:edits", "builtin:sessions"] * 2
        assert len(mixed) == 9
        first, second = (prompt.text.split() for prompt in mixed[:3:2])
        assert len(first) == len(second)
        assert sum(a != b for a, b in zip(first, second, strict=True)) == 1

    def test_times_are_told_beside_each_other(self, load, run, tmp_path):
        script = load("verified_ttft.py")
        plot = tmp_path / "plot.png"
        _, out = run(script, "--lengths", "300,400", "--rounds", 1, "--tokens", 3, "--plot", plot)
        rows = json.loads(out)["rows"]
        assert [row["tokens"] for row in rows] == [300, 400]
        for row in rows:
            assert 0 < row["provisional_first_s"] <= row["verified_first_s"] <= row["verified_last_s"]
            assert row["verified_last_over_off"] == pytest.approx(row["verified_last_s"] / row["off_last_s"])
            assert row["drafted_tokens"] >= 1
        assert plot.stat().st_size > 10_000
        assert len(script.markdown(rows).splitlines()) == 4


class TestHealLoad:
    @pytest.fixture
    def script(self, load):
        return load("heal_load.py")

    def test_settings_are_compared_with_off(self, script):
        def exchange(first, gap):
            return TimedRequest(0.0, 0.0, [first, first + gap], first + gap, None, 100, 2, 50)

        runs = [
            script.summed(mode, [exchange(first, 0.01)] * 20, healed)
            for mode, first, healed in (("always", 0.3, 900.0), ("off", 0.2, 0.0), ("idle", 0.1, 500.0))
        ]
        off, idle, always = script.compared(runs)
        assert [row["heal"] for row in (off, idle, always)] == list(script.MODES)
        assert (off["healed_tokens"], always["healed_tokens"]) == (0, 900)
        assert always["ttft_ms_over_off"]["p95"] == pytest.approx(1.5)
        assert idle["ttft_ms_p95_over_off_by_round"] == [0.5]
        assert always["gaps_ms_over_off"]["p50"] == pytest.approx(1)

    def test_healed_tokens_are_read_from_metrics(self, script):
        text = '# TYPE x counter\nkvgraft:healed_tokens_total{model_name="m"} 12.0\nkvgraft:healed_tokens_total 3.0\n'
        assert script.healed_tokens(text) == 15
        assert script.healed_tokens("kvgraft:other 3.0\n") == 0


class TestRemoteStores:
    """Beside the servers that the script starts; skipped where one is missing."""

    @pytest.mark.parametrize("name", ["redis", "mooncake"])
    def test_both_ways_of_reading_are_timed(self, load, run, monkeypatch, name):
        (need_redis if name == "redis" else need_mooncake)()
        script = load("store_remote.py")
        monkeypatch.setattr(sys.modules["store_bandwidth"], "never_reuse_memory", lambda: None)
        monkeypatch.setattr(sys.modules["store_bandwidth"], "DONOR_TOKENS", 600)
        code, out = run(script, "--stores", name, "--rows", "graft-tiny float32", "--spans", "300", "--repeats", "1")
        ((told,),) = (lines for lines in json.loads(out)["stores"].values())
        assert code == 0
        (line,) = told["spans"]
        assert line["tokens"] == 300
        assert min(line["tier_wall_ms"], line["plain_wall_ms"], line["span_wall_ms"]) > 0


class FakeVariant:
    """A server of the suite: what it has read it reuses, and a token that it computes takes a millisecond.

    Args:
        log: Gets who was asked what, and who was held still.
        reuses: Whether it reuses the documents of `FakeVariant.KNOWN`.
    """

    KNOWN = range(1000, 1100)

    def __init__(self, name, log, reuses, reply):
        self.name, self.log, self.reuses, self.reply = name, log, reuses, reply
        self.url = ""

    def ask(self, prompt):
        self.log.append((self.name, tuple(prompt)))
        known = list(self.KNOWN)
        at = next((i for i in range(len(prompt)) if prompt[i : i + len(known)] == known), None)
        reused = len(known) if self.reuses and at is not None else 0
        return self.reply(1e-3 * (len(prompt) - reused), len(prompt), reused, "a")

    def pause(self):
        self.log.append((self.name, "paused"))

    def resume(self):
        self.log.append((self.name, "resumed"))


class TestSuite:
    """Tables `engines` and `peers` on stand-ins for the servers."""

    SETTINGS: ClassVar = {
        "pack": "p",
        "min_prompt": 0,
        "max_prompt": 500,
        "warmup": 1,
        "requests": 4,
        "control": 2,
        "load_requests": 0,
        "load_runs": 0,
        "load_variants": ("off", "kvgraft"),
        "answer_tokens": 4,
        "limit_factor": 3.0,
        "threads": 1,
        "seed": 0,
    }
    PROMPTS = tuple([number, *FakeVariant.KNOWN, *range(9 + number)] for number in range(5))

    @pytest.fixture
    def engines(self, load, monkeypatch):
        script = load("engines/suite_engines.py")
        monkeypatch.setattr(script.time, "sleep", lambda _: None)
        return script

    def measured(self, script, journal, log, **changes):
        settings = script.Settings(**self.SETTINGS | changes)
        servers = {name: FakeVariant(name, log, name == "kvgraft", script.Reply) for name in script.VARIANTS}
        script.EngineRun("E", servers, self.PROMPTS, settings, journal).measure()
        return settings

    def test_engines_are_asked_in_turn_and_the_others_are_held_still(self, engines):
        log = []
        journal = engines.Journal(None, {}, engines.KEY)
        settings = self.measured(engines, journal, log)
        asked = [name for name, what in log if isinstance(what, tuple)]
        assert asked[:6] == ["off", "exact", "kvgraft", "exact", "kvgraft", "off"]
        assert [what if isinstance(what, str) else "asked" for _, what in log] == ["resumed", "asked", "paused"] * 21
        rows = {(row["workload"], row["variant"]): row for row in engines.rows_of(journal, settings, "E")}
        ours, off = rows["documents", "kvgraft"], rows["documents", "off"]
        assert (off["reused_share"], off["ttft_ratio"], ours["hit_share"], ours["requests"]) == (0, 1, 1, 4)
        lengths = [len(prompt) for prompt in self.PROMPTS[1:]]
        assert ours["reused_share"] == pytest.approx(400 / sum(lengths))
        assert ours["ttft_ratio"] == pytest.approx(np.median([n / (n - 100) for n in lengths]))
        assert rows["new text", "kvgraft"]["reused_share"] == 0
        assert rows["new text", "kvgraft"]["ttft_ratio"] == 1

    def test_engines_go_on_from_a_journal_and_read_again_what_caches_knew(self, engines, tmp_path):
        path, log = tmp_path / "journal.jsonl", []
        settings = self.measured(engines, engines.Journal(path, {"of": 1}, engines.KEY), [])
        whole = path.read_text().splitlines()
        path.write_text("\n".join(whole[:8]) + "\n")
        journal = engines.Journal(path, {"of": 1}, engines.KEY)
        assert not engines.is_complete(journal, settings, "E")
        self.measured(engines, journal, log)
        assert len([what for _, what in log if isinstance(what, tuple)]) == 21
        assert engines.is_complete(journal, settings, "E")
        assert path.read_text().splitlines()[:8] == whole[:8]
        assert len(path.read_text().splitlines()) == len(whole)

    def test_engines_tell_the_highest_rate_within_the_limit_of_off(self, engines, monkeypatch):
        async def at_rate(_run, _url, variant, rate, number):
            quick = rate * (1 if variant == "kvgraft" else 3) < 8
            assert number in range(3)
            times = {"p95": 10.0 if quick else 1e6}
            return engines.RunSummary(
                variant, rate, 4, 4, 4, {}, 0, None, 1.0, 1.0, 1.0, 1.0, 4, 0.0, 1.0, times, {}, {}, {}
            )

        monkeypatch.setattr(engines.EngineRun, "_at_rate", at_rate)
        journal = engines.Journal(None, {}, engines.KEY)
        settings = self.measured(engines, journal, [], load_runs=3, load_requests=1)
        rows = {
            row["variant"]: row for row in engines.rows_of(journal, settings, "E") if row["workload"] == "documents"
        }
        first = 0.5 / np.mean([1e-3 * len(prompt) for prompt in self.PROMPTS[1:]])
        assert rows["off"]["requests_per_s"] == pytest.approx(first / 2)
        assert rows["kvgraft"]["requests_per_s"] == pytest.approx(first * 2**0.5)
        assert rows["kvgraft"]["rate_ratio"] == pytest.approx(2 * 2**0.5)
        assert "requests_per_s" not in rows["exact"]
        assert rows["off"]["limit_ms"] == pytest.approx(3 * np.percentile([len(p) for p in self.PROMPTS[1:]], 95))

    def test_engines_read_the_counts_of_every_server(self, load):
        servers = load("engines/suite_servers.py")
        report = {"num_tokens": 40, "computed_tokens": 17}
        usage = {"prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": 39}}
        said = [{"choices": [{"text": "x"}]}, {"choices": [{"text": "y"}], "usage": None}]
        assert servers.completion_reply([*said, {"choices": [], "usage": usage}]) == (40, 39, "x")
        assert servers.completion_reply([*said, {"choices": [], "usage": usage, "kvgraft": report}]) == (40, 23, "x")
        facts = {"prompt_tokens": 40, "cached_tokens": 39}
        first = {"meta_info": facts, "output_ids": [7]}
        assert servers.generate_reply([first, {"meta_info": facts, "output_ids": [7, 8]}]) == (40, 39, "7")
        facts |= {"kvgraft": [{"report": report}]}
        assert servers.generate_reply([first, {"meta_info": facts, "output_ids": [7, 8]}]) == (40, 23, "7")

    def test_every_variant_of_an_engine_differs_in_its_cache_alone(self, load, tmp_path):
        servers = load("engines/suite_servers.py")
        site = servers.Site(tmp_path, 1, 512, tmp_path)
        for engine in servers.ENGINES.values():
            commands = [engine.command(site, variant, 9) for variant in servers.VARIANTS]
            assert len(set(map(tuple, commands))) == 3
            shared = set.intersection(*map(set, commands))
            assert {str(tmp_path), "9", "float32"} <= shared

    def test_a_failure_is_a_line_without_paths(self, load):
        script = load("engines/vllm_server.py")
        said = 'it said:\n  File "/srv/x/y.py"\nValueError: no room in /srv/x/y for it\nkilled'
        assert script.reason(script.ServerError(said)) == "ValueError: no room in ... for it"
        assert script.reason(script.ServerError("there is no server")) == "there is no server"

    def test_cases_of_peers_share_what_they_say(self, load):
        script = load("peers/suite_peers.py")
        text = script.Text(range(100_000))
        shared = {}
        for name, case in script.CASES.items():
            prompts = case(text, 300)
            shared[name] = len(set(prompts.donor) & set(prompts.target))
            assert len(set(prompts.target)) == len(prompts.target)
        expected = {"prefix": 428, "deleted": 328, "front": 300, "moved": 300, "aligned": 300, "unrelated": 0}
        assert shared == expected
        prompts = script.aligned(text, 300)
        at = [tokens.index(prompts.donor[256]) for tokens in (prompts.donor, prompts.target)]
        assert at == [256, 512]

    def test_peers_are_compared_with_their_own_cold_run(self, load, monkeypatch):
        script = load("peers/suite_peers.py")
        monkeypatch.setattr(script.time, "sleep", lambda _: None)
        settings = script.Settings(300, ("moved", "unrelated"), 3, 1, 0)
        journal, read = script.Journal(None, {}, script.KEY), set()

        def ask(token_ids, cold):
            known = 0 if cold else sum(token in read for token in token_ids)
            read.update(token_ids)
            wrong = 0.25 * bool(known)
            logprobs = {"1": -1.0 - wrong, "2": -2.0, "3": -0.1 * (token_ids[0] % 7) - 3}
            return script.Answer(1e-3 * (len(token_ids) - known), len(token_ids), known, logprobs)

        for model in (script.WHOLE, script.ONE_LAYER):
            text = script.Text(range(500_000))
            read.clear()
            script.PeerRun("P", model, ask, text=text, settings=settings, journal=journal).measure()
            assert script.is_complete(journal, settings, "P", model)
        moved, unrelated = script.rows_of(journal, settings, "P")
        assert (moved["case"], moved["rounds"], moved["reused_tokens"]) == ("moved", 3, 300)
        assert moved["ttft_ratio"] == pytest.approx(452 / 152)
        assert moved["gap"] == moved["one_layer_gap"] == pytest.approx(0.25)
        assert (unrelated["reused_tokens"], unrelated["gap"], unrelated["one_layer_gap"]) == (0, 0, 0)
        assert moved["one_layer_unrelated_gap"] is not None

    def test_a_cold_run_that_reused_something_is_no_cold_run(self, load, monkeypatch):
        script = load("peers/suite_peers.py")
        monkeypatch.setattr(script.time, "sleep", lambda _: None)
        settings = script.Settings(300, ("moved",), 1, 1, 0)
        run = script.PeerRun(
            "P",
            script.WHOLE,
            lambda token_ids, _: script.Answer(1.0, len(token_ids), 5, {"1": -1.0}),
            text=script.Text(range(10_000)),
            settings=settings,
            journal=script.Journal(None, {}, script.KEY),
        )
        with pytest.raises(script.ServerError, match="without reuse was answered with 5 cached tokens"):
            run.measure()

    def test_the_first_of_two_tokens_is_timed(self, load, monkeypatch):
        script, asked = load("peers/suite_peer_servers.py"), []
        choice = {"logprobs": {"top_logprobs": [{"token_id:7": -0.5, "token_id:8": -1.5}]}}
        usage = {"prompt_tokens": 90, "prompt_tokens_details": {"cached_tokens": 64}}
        likeliest = [{"id": 7, "logprob": -0.5}]
        streams = {
            "/v1/completions": [{"choices": [choice]}, {"choices": [choice]}, {"choices": [], "usage": usage}],
            "/completion": [
                {"completion_probabilities": [{"top_logprobs": likeliest}]},
                {"tokens_evaluated": 90, "timings": {"cache_n": 64}},
            ],
        }

        def timed_events(port, path, body, timeout_s):
            asked.append(body)
            return [(1.0 + number, event) for number, event in enumerate(streams[path])]

        monkeypatch.setattr(script, "timed_events", timed_events)
        for ask in (script.ask_vllm, script.ask_llama_cpp):
            answer = ask(9, [3, 4], False)
            assert (answer.seconds, answer.prompt_tokens, answer.cached_tokens) == (1.0, 90, 64)
            assert max(answer.logprobs.values()) == -0.5
        assert [body.get("max_tokens", body.get("n_predict")) for body in asked] == [2, 2]
        counts = iter([100, 164])
        monkeypatch.setattr(script, "counted_tokens", lambda url: next(counts))
        monkeypatch.setattr(script.time, "sleep", lambda _: None)
        usage["prompt_tokens_details"] = {"cached_tokens": 80}
        assert script.ask_grafting_vllm(9, [3, 4], False).cached_tokens == 64

    def test_a_peer_that_is_not_there_is_a_row_with_the_reason(self, load, run, monkeypatch, tmp_path):
        script = load("peers/suite_peers.py")
        monkeypatch.setattr(script, "missing", lambda peer: f"there is no {peer.name}")
        code, out = run(script, "--peers", "kvboost,llama.cpp", "--model", tmp_path, "--one-layer", tmp_path)
        record = json.loads(out)
        assert (code, record["table"]) == (0, "peers")
        assert [row["failure"] for row in record["rows"]] == ["there is no kvboost", "there is no llama.cpp"]


class TestRecordedAgents:
    """`engines/agent_traces.py` and `engines/agent_times.py`."""

    @pytest.fixture
    def packs(self, tmp_path):
        calls = {
            "one": [{"after": 0, "tokens": [*range(40)]}, {"after": 40, "tokens": [*range(100, 110)]}],
            "two": [{"after": 0, "tokens": [7, *range(20)]}],
        }
        for client, own in calls.items():
            with gzip.open(tmp_path / f"{client}.jsonl.gz", "wt") as file:
                file.writelines(json.dumps(call) + "\n" for call in own)
        return tmp_path

    def test_computed_tokens_are_those_of_the_own_calls(self, load, packs):
        script, asked = load("engines/agent_traces.py"), []

        def ask(prompt, mode, salt):
            asked.append((len(prompt), mode, salt))
            return {"computed_tokens": {"exact": [21, 39, 10], "graft": [21, 20, 30]}[mode][(len(asked) - 1) % 3]}

        row = script.trace(packs, "one", "two", ask)
        assert row == {
            "client": "one",
            "seed": "two",
            "prompts": 2,
            "tokens": 90,
            "bound": 30,
            "exact": 49,
            "graft": 50,
            "worst_lead_of_exact": 1,
        }
        assert asked[:3] == [(length, "exact", "one after two, exact") for length in (21, 40, 50)]

    def test_reports_are_read_where_each_engine_has_them(self, load, monkeypatch):
        script, bodies = load("engines/agent_traces.py"), []

        def post(url, body):
            bodies.append(body)
            found = {"computed_tokens": 5}
            if url.endswith("/generate"):
                return {"meta_info": {"kvgraft": [{"report": {"computed_tokens": 9}}, {"report": found}]}}
            return {"kv_transfer_params": {"kvgraft": found}}

        monkeypatch.setattr(script, "post", post)
        for ask in (script.ask_vllm, script.ask_sglang):
            assert ask("http://host", [3, 4], "exact", "a salt") == {"computed_tokens": 5}
        assert [body.get("cache_salt", body.get("extra_key")) for body in bodies] == ["a salt"] * 2

    def test_a_folder_without_packs_is_named(self, load, run, tmp_path):
        load("engines/agent_traces.py")
        with pytest.raises(SystemExit, match="there is no pack in"):
            run(load("engines/agent_traces.py"), "vLLM", "--packs", tmp_path)

    def test_servers_are_timed_in_alternating_order(self, load, monkeypatch):
        script, asked = load("engines/agent_times.py"), []

        def timed_events(port, path, body, timeout_s):
            asked.append((port, body["max_tokens"]))
            usage = {"prompt_tokens": 4, "prompt_tokens_details": {"cached_tokens": 1 if port == 9 else 3}}
            return [(1.0, {"choices": [{"text": "x"}]}), (2.0, {"choices": [], "usage": usage})]

        monkeypatch.setattr(script, "timed_events", timed_events)
        monkeypatch.setattr(script, "EngineServer", lambda *_: SimpleNamespace(resume=lambda: None, pause=lambda: None))
        pair = script.Pair(script.ENGINES["vLLM"], None, 9)
        rows = [pair.ask([1, 2, 3, 4]) for _ in range(2)]
        assert asked == [(9, 16), (29, 16), (29, 16), (9, 16)]
        assert rows[0]["exact"] == {"first_s": 1.0, "answer_s": 2.0, "computed": 3}
        found = script.summary("one", rows)
        assert found["calls"] == 2
        assert found["computed"] == {"exact": 6, "kvgraft": 2, "ratio": 3, "median_ratio": 3}


class TestAnswers:
    """`engines/answers.py`."""

    @pytest.fixture
    def script(self, load):
        return load("engines/answers.py")

    def test_every_kind_is_asked_once_per_round_for_a_document_that_was_read(self, script):
        sent = []

        def send(kind, prompt):
            sent.append((kind, prompt))
            return script.Timed(1.0, 2.0, 9.0)

        found = script.measure(send, 40, 3, np.random.default_rng(0))
        assert {kind: len(times) for kind, times in found.items()} == dict.fromkeys(script.KINDS, 3)
        for number in range(4):
            (_, known), *asked = sent[5 * number : 5 * number + 5]
            document = known[script.HEAD : script.HEAD + 40]
            assert sorted(kind for kind, _ in asked) == sorted(script.KINDS)
            for kind, prompt in asked:
                start = script.HEAD if kind == "exact" else script.NEW_HEAD
                assert prompt[start : start + 40] == document
                assert (prompt[: script.HEAD] == known[: script.HEAD]) == (kind == "exact")

    def test_tokens_are_events_with_something_new(self, script):
        completion = [b'data: {"choices": [{}]}\n', b"\n", b'data: {"choices": []}\n', b'data: {"choices": [{}]}\n']
        assert len(list(script.token_times(completion))) == 2
        growing = [b'data: {"output_ids": [1]}\n', b'data: {"output_ids": [1]}\n', b'data: {"output_ids": [1, 2]}\n']
        assert len(list(script.token_times(growing))) == 2

    def test_each_engine_is_asked_in_its_own_words(self, script):
        path, body = script.asked("vLLM", "after")([1])
        assert (path, body["kv_transfer_params"]) == (
            "/v1/completions",
            {"kvgraft": "graft", "kvgraft_repair": "after"},
        )
        path, body = script.asked("SGLang", "off")([1])
        assert (path, body["sampling_params"]["custom_params"]) == ("/generate", {"kvgraft": "off"})
        assert script.asked("kvgraft serve", "before")([1])[1]["kvgraft"] == {"reuse": "graft", "repair": "before"}

    def test_ratios_are_those_of_medians(self, script):
        found = {kind: [script.Timed(1.0, 1.0, 2.0)] * 3 for kind in script.KINDS}
        found["after"] = [script.Timed(2.0, 5.0, 8.0)] * 3
        row = script.row("after", found, 0)
        assert (row["first_of_exact"], row["total_of_off"], row["second_ms"]) == (2.0, 4.0, 5.0)
        assert row["first_of_off_ci"] == [2.0, 2.0]
