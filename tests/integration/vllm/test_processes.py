"""Where vLLM runs in several processes: its own engine process, two tensor-parallel ranks, the HTTP server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import scenario
from http_server import PATIENCE_S, http_server
from models import save_tiny
from scripted_provider import FOLDER, Script

from engines import Answer, engine, text

HERE = Path(__file__).parent
HEAD, OTHER_HEAD, QUESTION, OTHER_QUESTION = text(1, 50), text(2, 130), text(3, 40), text(4, 45)
DOCUMENT = text(5, 700)
DONOR, PROMPT = HEAD + DOCUMENT + QUESTION, OTHER_HEAD + DOCUMENT + OTHER_QUESTION


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
LOOKING = ["query kept", "attention observed", "attention summed", "drift corrected"]
"""Stages of policies that observe the query's attention, and of what is corrected by their choice."""


@pytest.mark.parametrize("load", ["sync", "async"])
def test_a_rank_that_fails_stops_no_other(model_folder, alone, load):
    """Whatever a rank does between two collective operations: if it fails there, all ranks let vLLM compute."""
    model = save_tiny("llama", model_folder)
    options = {"load": load, "selection": "kv_deviation", "recompute_ratio": 0.3, "max_recompute_tokens_per_step": 400}
    options["repair"] = "before"
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
            ("another rank failed; its log says why", "another rank could not begin")
        )
        warm.assert_like(answer["cold"])
    for stage, (first, second) in checks.items():
        assert "another rank failed" in first, stage
        assert f"injected: {stage}" in second, stage


def test_a_rank_that_fails_while_it_looks_stops_no_other(model_folder):
    """Between the layers' own collective operations nothing is raised: all ranks come to the end of the pass."""
    model = save_tiny("llama", model_folder)
    options = {"selection": "query_seam", "recompute_ratio": 0.3, "repair": "before"}
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


def test_a_rank_that_fails_in_a_repair_stops_no_other(model_folder):
    """The first token is out; all ranks compute everything from the first reused one on, and the request goes on."""
    model = save_tiny("llama", model_folder)
    stages = ["attention observed", "attention summed", "drift corrected"]
    broken = {stage: text(100 + number, 130) + DOCUMENT + text(200 + number, 45) for number, stage in enumerate(stages)}
    whole, *failed = run_scenario("0|1", model=model, ranks=2, donors=[DONOR], prompts=[PROMPT], broken=broken)
    assert whole["warm"].report["repair"]["from_token"] == 2
    assert whole["warm"].report["repair"]["exact_from_token"] is None
    for stage, answer in zip(broken, failed, strict=True):
        repair = answer["warm"].report["repair"]
        assert (repair["from_token"], repair["exact_from_token"]) == (2, 2), stage
        assert repair["reason"].endswith("another rank failed; its log says why"), stage
        assert len(answer["warm"].tokens) == 6


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


def test_two_ranks_have_a_store_each_and_use_a_donor_together(model_folder, alone, tmp_path):
    """Of two replicas one behind the other: text of the first, half of it by each rank, is grafted by the second.

    A rank that cannot read its half makes both compute. Behind a change of the second's weights both have other spaces.
    """
    model, folder = save_tiny("llama", model_folder), tmp_path / "store"
    second = text(6, 600)
    asked = {"model": model, "options": {**FIRST_K, "store": f"file:{folder}"}}
    donors = [DONOR, text(20, 60) + second]
    run_scenario("0|1", **asked, ranks=2, donors=donors, prompts=[], await_files=[str(folder), 4])
    assert len(_spaces(folder)) == 2
    broken = {"stored text read": text(21, 70) + second + OTHER_QUESTION}
    files = [str(folder), 4]
    answers = run_scenario(
        "0|1", **asked, ranks=2, donors=[], prompts=[PROMPT], broken=broken, await_files=files, trained="second"
    )
    whole, failed, trained = answers
    assert whole["warm"].shifted == alone.shifted == len(DOCUMENT) - 16
    assert {span["tier"] for span in whole["warm"].report["spans"]} == {"file"}
    whole["warm"].assert_like(alone)
    assert failed["warm"].shifted == 0
    assert failed["warm"].report["miss"]["reason"] == "store"
    failed["warm"].assert_like(failed["cold"])
    assert trained["warm"].shifted == 0
    assert len(_spaces(folder)) == 4


def _spaces(folder):
    return {path.parent for path in folder.glob("*/*.safetensors")}


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


def the_quickstarts_answer(url):
    """Ask as the quickstart of this integration does, a smaller model about less text, and return the last answer."""
    root = HERE.parents[2]
    page = (root / "docs/quickstart/vllm.md").read_text()
    (script,) = re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    as_here = {
        "localhost:8000": url,
        "Qwen/Qwen2.5-1.5B-Instruct": "tiny",
        "-c 4000": "-c 1500",
        " | jq .kv_transfer_params.kvgraft": "",
    }
    for shown, here in as_here.items():
        assert shown in script, shown
        script = script.replace(shown, here)
    ran = subprocess.run(["bash", "-ec", script], cwd=root, capture_output=True, check=True, timeout=300, text=True)
    return json.loads(ran.stdout[ran.stdout.rindex('{"id"') :])


def test_openai_client_over_http(tmp_path):
    openai = pytest.importorskip("openai")
    log = tmp_path / "server.log"
    with http_server(log, selection="none", min_saved_tokens=16) as url:
        assert "kvgraft is ready" not in log.read_text(), "nothing was proved yet"
        shown = the_quickstarts_answer(url)
        assert shown["kv_transfer_params"]["kvgraft"]["num_tokens"] > 0
        assert shown["kv_transfer_params"]["kvgraft"]["shifted_tokens"] > 0
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
        several = ask([text(50, 40), text(51, 20)], "graft")
        assert several.kv_transfer_params["kvgraft"]["num_tokens"] == 40, "the page says: the first prompt's alone"
        streamed = client.completions.create(model="tiny", prompt=prompt, max_tokens=4, stream=True)
        assert "".join(part.choices[0].text for part in streamed if part.choices)
        metrics = urllib.request.urlopen(f"{url}/metrics", timeout=10).read().decode()
        assert re.search(r'kvgraft:prompt_tokens_total\{[^}]*kind="segment"[^}]*\} [1-9]', metrics)
        assert re.search(r"kvgraft:grafted_requests_total\{[^}]*\} [1-9]", metrics)
        assert re.search(r'kvgraft:graft_misses_total\{[^}]*reason="reuse_off"[^}]*\} [1-9]', metrics)
        assert re.search(r"kvgraft:donor_host_bytes\{[^}]*\} [1-9]", metrics)
        assert "kvgraft:lookup_seconds_count" in metrics
        assert re.search(r"kvgraft:donors\{[^}]*\} [1-9]", metrics)


def test_another_text_over_http(tmp_path):
    """A paraphrase, a contradiction, a shared system prompt and a shared first token, as clients send them."""
    openai = pytest.importorskip("openai")
    (tmp_path / "script").mkdir()
    script = Script(tmp_path / "script")
    path = os.pathsep.join([str(HERE.parents[1] / "standins"), os.environ.get("PYTHONPATH", "")])
    options = {
        "semantic_provider": "scripted_provider:Scripted",
        "semantic_deadline_ms": 60_000,
        "min_saved_tokens": 16,
    }
    environ = {FOLDER: str(script.folder), "PYTHONPATH": path}
    flags = ["--shutdown-timeout", "60"]  # by default vLLM kills its scheduler at once
    with http_server(tmp_path / "log", environ, flags, **options) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

        def ask(prompt, mode):
            extra = {"kv_transfer_params": {"kvgraft": mode}, "ignore_eos": True}
            answer = client.completions.create(
                model="tiny", prompt=prompt, max_tokens=4, temperature=0, extra_body=extra
            )
            return answer.choices[0].text, answer.kv_transfer_params["kvgraft"]

        stored = text(40, 400)
        ask(stored, "graft")
        script.stored()
        script.answer(stored, source_id="doc-7", metadata={"similarity": 0.83})
        paraphrase = text(41, 300)
        said, report = ask(paraphrase, "substitute")
        assert (report["substituted_tokens"], report["substitution"]["source_id"]) == (299, "doc-7")
        assert said == ask(stored[:299] + paraphrase[299:], "off")[0]
        assert ask(paraphrase, "exact")[1]["reused_tokens"] == 0
        contradiction = [*stored[:200], stored[200] % 300 + 700, *stored[201:], *text(42, 5)]
        said, report = ask(contradiction, "substitute")
        assert (report["substituted_tokens"], report["shifted_tokens"] > 0) == (0, True), "what is equal is grafted"
        assert all(not start <= 200 < start + length for start, length in spans_of(report)), "the rest is computed"
        for shared in (1, 96):
            report = ask(stored[:shared] + text(43 + shared, 300), "substitute")[1]
            exact = shared // 32 * 32
            assert (report["exact_tokens"], report["substituted_tokens"]) == (exact, shared + 299 - exact)
    assert script.awaited("shutdown")


def spans_of(report):
    return [(span["target_start"], span["length"]) for span in report["spans"]]
