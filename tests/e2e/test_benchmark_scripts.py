"""Every script in `benchmarks/` at toy size: it runs, and its figures move when what it measures does.

A script that needs an engine or a package that is not here is run as far as that goes: its arithmetic against a stand-in for
the server, or its help.
"""

from __future__ import annotations

import importlib.util
import json
import py_compile
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.unit.bench.simulation import SimulatedServer, run_in_simulated_time

from kvgraft.donors import DonorCatalogue
from kvgraft.engine import LLM, SamplingParams
from kvgraft.prefix import EvictResult, RadixCache

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
HELPERS = {"prefix/trees.py", "prefix/sglang_stand_ins.py", "engines/vllm_server.py"}
"""Imported by the scripts."""

COVERED = HELPERS | {
    "bench_lookup.py",
    "bench_radix.py",
    "bench_risk.py",
    "bench_streams.py",
    "donor_substitution.py",
    "fidelity_pairs.py",
    "record.py",
    "risk_streams.py",
    "soak.py",
    "prefix/bench_events.py",
    "prefix/bench_hybrid_chat.py",
    "prefix/bench_hybrid_memory.py",
    "prefix/bench_trees.py",
    "prefix/soak.py",
    "prefix/table.py",
    "engines/make_model.py",
    "engines/sglang_rag.py",
    "engines/sglang_ttft.py",
    "engines/two_commits.py",
    "engines/vllm_ttft.py",
    "peers/exact_runs.py",
    "peers/peers_ttft.py",
}


def test_every_script_has_a_test_here():
    assert {str(path.relative_to(BENCHMARKS)) for path in BENCHMARKS.rglob("*.py")} == COVERED


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


@pytest.mark.slow
def test_soak_kills_and_restarts_a_server_on_the_same_port(load, run, model_dir):
    code, out = run(load("soak.py"), "--model", model_dir, "--requests", 60, "--clients", 4, "--num-slots", 500)
    result = json.loads(out)
    assert (code, result["passed"], result["problems"]) == (0, True, {})
    assert sum(result["requests"].values()) == 60
    assert {"stream", "whole"} <= set(result["requests"])
    assert result["reused_share"] > 0.05
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

    def test_hybrid_chat_holds_less_and_answers_the_same(self, load, run, monkeypatch):
        monkeypatch.setattr("kvgraft.prefix.registry._FACTORIES", {})
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

    def test_sglang_answers_are_compared_token_by_token(self, load):
        script = load("engines/sglang_rag.py")
        truth = [{"tokens": [1, 2, 3, 4], "cached": 0, "ttft_ms": 10.0}] * 2
        other = [truth[0] | {"cached": 5}, {"tokens": [1, 2, 9, 9], "cached": 0, "ttft_ms": 20.0}]
        row = script.summary("x", [[0] * 10, [0] * 10], other, truth)
        figures = ("reused_percent", "same_first_token_percent", "same_tokens_percent", "same_answer_percent")
        assert [row[name] for name in figures] == [25.0, 100.0, 75.0, 50.0]

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

    def test_two_commits_need_a_checkout(self, load, tmp_path):
        script = load("engines/two_commits.py")
        with pytest.raises(SystemExit, match="no checkout of kvgraft"):
            script.environment(tmp_path)

    def test_peers_have_help(self, load, run):
        script = load("peers/peers_ttft.py")
        with pytest.raises(SystemExit) as stop:
            run(script, "--help")
        assert stop.value.code == 0

    def test_lookup_for_the_peer_is_python(self, tmp_path):
        """Its package is not here."""
        py_compile.compile(str(BENCHMARKS / "peers/exact_runs.py"), str(tmp_path / "compiled"), doraise=True)
