"""Where vLLM runs in several processes: its own engine process, two tensor-parallel ranks, the HTTP server."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
import scenario
from models import save_tiny

from engines import PATIENT, Answer, engine, text
from kvgraft.models import bundled_model_path

HERE = Path(__file__).parent
HEAD, OTHER_HEAD, QUESTION, OTHER_QUESTION = text(1, 50), text(2, 130), text(3, 40), text(4, 45)
DOCUMENT = text(5, 700)
DONOR, PROMPT = HEAD + DOCUMENT + QUESTION, OTHER_HEAD + DOCUMENT + OTHER_QUESTION


PATIENCE_S = 1800
"""Generous: where ranks wait for one another for ever, this ends it."""


def run_scenario(threads: str, **asked) -> list[dict[str, Answer]]:
    return run(threads, **asked)[0]


def run(threads: str, **asked) -> tuple[list[dict[str, Answer]], dict[str, list[str]]]:
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CPU_OMP_THREADS_BIND": threads,
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    }
    finished = subprocess.run(
        [sys.executable, HERE / "scenario.py", json.dumps(asked)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=PATIENCE_S,
        check=False,
    )
    found = re.search(r"^ANSWERS(.*)$", finished.stdout, re.MULTILINE)
    assert found, finished.stdout[-3000:] + finished.stderr[-5000:]
    told = json.loads(found[1])
    return [{kind: _answer(value) for kind, value in pair.items()} for pair in told["answers"]], told["checks"]


def _answer(value) -> Answer:
    logprobs = tuple({int(token): logprob for token, logprob in step.items()} for step in value["logprobs"])
    return Answer(tuple(value["tokens"]), logprobs, value["num_cached"], value["report"])


FIRST_K = {"selection": "first_k", "correction": "none"}
"""What any number of ranks computes alike: estimates of drift differ by the heads that a rank holds."""


@pytest.fixture(scope="module")
def alone(model_folder):
    """The graft in one process and one rank."""
    with engine(model_folder, "llama", options=FIRST_K) as one:
        one.donate(DONOR)
        return one.ask(PROMPT)


STAGES = list(scenario.STAGES)
GRAFTING, CHECKING = STAGES[: STAGES.index("text captured")], STAGES[STAGES.index("layers described") :]
CAPTURING = ["text captured", "donor sealed"]
LOOKING = ["attention observed", "query attended", "query run", "attention summed", "drift corrected"]
"""Stages of policies that observe the query's attention, and of what is corrected by their choice."""


@pytest.mark.parametrize("load", ["sync", "async"])
def test_a_rank_that_fails_stops_no_other(model_folder, alone, load):
    """Whatever a rank does between two collective operations: if it fails there, all ranks let vLLM compute."""
    model = save_tiny("llama", model_folder)
    options = {"load": load, "selection": "kv_deviation", "recompute_ratio": 0.3, "max_recompute_tokens_per_step": 400}
    broken = {
        stage: text(100 + number, 130) + DOCUMENT + text(200 + number, 45)
        for number, stage in enumerate([*(stage for stage in GRAFTING if stage not in LOOKING), *CAPTURING])
    }
    checked = [stage for stage in CHECKING if stage != "query looked at"]
    answers, checks = run(
        "0|1", model=model, ranks=2, donors=[DONOR], prompts=[PROMPT], options=options, broken=broken, checked=checked
    )
    assert answers[0]["warm"].shifted == len(DOCUMENT) - 210
    for stage, answer in zip(broken, answers[1:], strict=True):
        warm = answer["warm"]
        if stage in CAPTURING:
            assert warm.shifted == len(DOCUMENT) - 210, (
                stage,
                warm.report["miss"],
                [a["warm"].report["miss"] for a in answers],
            )
            continue
        assert warm.shifted == 0, stage
        assert warm.report["miss"]["reason"] == "error", stage
        assert warm.report["miss"]["detail"].endswith(
            ("another rank failed; its log says why", "could not read its donors")
        )
        warm.assert_like(answer["cold"])
    for stage, (first, second) in checks.items():
        assert "another rank failed" in first, stage
        assert f"injected: {stage}" in second, stage


def test_a_rank_that_fails_while_it_looks_stops_no_other(model_folder):
    """Between the layers' own collective operations nothing is raised: all ranks come to the end of the pass."""
    model = save_tiny("llama", model_folder)
    options = {"selection": "query_seam", "recompute_ratio": 0.3}
    broken = {
        stage: text(100 + number, 130) + DOCUMENT + text(200 + number, 45) for number, stage in enumerate(LOOKING)
    }
    answers, checks = run(
        "0|1",
        model=model,
        ranks=2,
        donors=[DONOR],
        prompts=[PROMPT],
        options=options,
        broken=broken,
        checked=["query looked at", "drift looked at", "gaps compared"],
    )
    assert answers[0]["warm"].shifted == len(DOCUMENT) - 210
    for stage, answer in zip(broken, answers[1:], strict=True):
        warm = answer["warm"]
        assert warm.shifted == 0, stage
        assert warm.report["miss"]["reason"] == "error", stage
        assert warm.report["miss"]["detail"].endswith("another rank failed; its log says why")
        warm.assert_like(answer["cold"])
    for stage, (first, second) in checks.items():
        assert "another rank failed" in first, stage
        assert f"injected: {stage}" in second, stage


@pytest.mark.parametrize("told", ["reset", "nothing"])
def test_all_ranks_forget_what_another_model_computed(model_folder, told):
    model = save_tiny("llama", model_folder)
    before, after = run_scenario(
        "0|1", model=model, ranks=2, donors=[DONOR], prompts=[PROMPT], options={"selection": "none"}, trained=told
    )
    assert before["warm"].shifted == len(DOCUMENT)
    assert after["warm"].shifted == 0
    assert after["warm"].tokens != before["warm"].tokens
    after["warm"].assert_like(after["cold"])


def test_two_ranks_agree_with_one(model_folder, alone):
    model = save_tiny("llama", model_folder)
    options = {**FIRST_K, "load": "async"}
    (whole,) = run_scenario("0|1", model=model, ranks=2, donors=[DONOR], prompts=[PROMPT], options=options)
    assert whole["warm"].shifted == alone.shifted == len(DOCUMENT) - 16
    whole["warm"].assert_like(alone)


@pytest.mark.parametrize("selection", ["kv_deviation", "query_seam"])
def test_two_ranks_that_observe_choose_the_same_tokens(model_folder, selection):
    options = {"selection": selection, "recompute_ratio": 0.3, "correction": "none"}
    with engine(model_folder, "llama", options=options) as one:
        one.donate(DONOR)
        alone = one.ask(PROMPT)
    model = save_tiny("llama", model_folder)
    (pair,) = run_scenario("0|1", model=model, ranks=2, donors=[DONOR], prompts=[PROMPT], options=options)
    assert pair["warm"].report["recomputed_tokens"] == alone.report["recomputed_tokens"] == 210
    pair["warm"].assert_like(alone, tolerance=1e-3)


def test_two_ranks_correct_by_the_heads_that_they_hold(model_folder):
    """The same tokens as one rank, by estimates that each forms from its own heads: near, and not equal."""
    with engine(model_folder, "llama") as one:
        one.donate(DONOR)
        alone = one.ask(PROMPT)
    model = save_tiny("llama", model_folder)
    (pair,) = run_scenario("0|1", model=model, ranks=2, donors=[DONOR], prompts=[PROMPT])
    told = ("recomputed_tokens", "corrected_tokens", "shifted_tokens")
    assert [pair["warm"].report[name] for name in told] == [alone.report[name] for name in told] == [70, 630, 630]
    pair["warm"].assert_like(alone, tolerance=0.1)


def test_an_engine_in_a_process_of_its_own_that_is_compiled(model_folder):
    with engine(model_folder, "llama") as one:
        one.donate(DONOR)
        alone = one.ask(PROMPT)
    assert alone.report["corrected_tokens"] > 0
    model = save_tiny("llama", model_folder)
    (pair,) = run_scenario("0-1", model=model, donors=[DONOR], prompts=[PROMPT], enforce_eager=False)
    assert pair["warm"].shifted == alone.shifted
    pair["warm"].assert_like(alone)


@contextmanager
def http_server(log, **options):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    connector = {
        "kv_connector": "GraftConnector",
        "kv_connector_module_path": "kvgraft.integrations.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {**PATIENT, **options},
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(bundled_model_path())]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--enforce-eager", "--max-model-len", "4096", "--max-num-seqs", "4", "--block-size", "32"]
    command += ["--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(connector)]
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0-1",
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    with log.open("w") as written:
        process = subprocess.Popen(
            command, env=environment, stdout=written, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _wait_until_ready(process, port, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def _wait_until_ready(process, port, log):
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(log.read_text()[-5000:])
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
        except OSError:
            time.sleep(0.5)
        else:
            return
    raise AssertionError("the server did not become ready")


def test_openai_client_over_http(tmp_path):
    openai = pytest.importorskip("openai")
    log = tmp_path / "server.log"
    with http_server(log, selection="none", min_saved_tokens=16) as url:
        assert "kvgraft is ready: mode graft, selection none" in log.read_text(), "users see it in vLLM's log"
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

        def ask(prompt, mode, **more):
            return client.completions.create(
                model="tiny",
                prompt=prompt,
                max_tokens=8,
                temperature=0,
                logprobs=5,
                extra_body={"kv_transfer_params": {"kvgraft": mode}, **more},
            )

        document = "".join(f"Module number {n} computes the value of item {n * 7 % 13}.\n" for n in range(60))
        ask("You are terse.\n" + document + "What is item 3?", "exact")
        prompt = "Answer in one word, and only if you are sure of it.\n" + document + "What is item 9?"
        cold = ask(prompt, "off", cache_salt="cold")
        warm = ask(prompt, "graft")
        report = warm.kv_transfer_params["kvgraft"]
        assert report["shifted_tokens"] > 400
        assert warm.usage.prompt_tokens_details.cached_tokens >= report["shifted_tokens"]
        after = ask(prompt, "exact")
        assert after.kv_transfer_params["kvgraft"]["shifted_tokens"] == 0
        assert after.choices[0].text == cold.choices[0].text
        other = ask("Terse!\n" + document, "graft", cache_salt="another tenant")
        assert other.kv_transfer_params["kvgraft"]["reused_tokens"] == 0
        streamed = client.completions.create(model="tiny", prompt=prompt, max_tokens=4, stream=True)
        assert "".join(part.choices[0].text for part in streamed if part.choices)
        metrics = urllib.request.urlopen(f"{url}/metrics", timeout=10).read().decode()
        assert re.search(r'kvgraft:prompt_tokens_total\{[^}]*kind="segment"[^}]*\} [1-9]', metrics)
        assert re.search(r"kvgraft:grafted_requests_total\{[^}]*\} [1-9]", metrics)
        assert re.search(r'kvgraft:graft_misses_total\{[^}]*reason="reuse_off"[^}]*\} [1-9]', metrics)
        assert re.search(r"kvgraft:donor_host_bytes\{[^}]*\} [1-9]", metrics)
        assert "kvgraft:lookup_seconds_count" in metrics
        assert re.search(r"kvgraft:donors\{[^}]*\} [1-9]", metrics)
