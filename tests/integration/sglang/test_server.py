"""Servers from start to end: refusals, controls, tiers, metrics, commands."""

from __future__ import annotations

import random
import re
import time
from contextlib import suppress

import pytest
from kv_listener import Listener
from models import VOCABULARY
from scripted_provider import FOLDER, Script
from server import SGLangServer

from kvgraft.cli import main
from kvgraft.integrations.sglang.doctor import diagnose
from reference import Copied, Fresh, Reference

# SGLang warns while it is imported on a CPU.
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def ids(request):
    """Random tokens, others in every test: servers are shared."""
    rng = random.Random(request.node.name)
    return lambda count: [rng.randrange(3, VOCABULARY) for _ in range(count)]


def logprobs(answer):
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


def agrees(answer, want, tolerance=1e-5):
    assert answer["output_ids"] == want.tokens
    assert max(abs(a - b) for a, b in zip(logprobs(answer), want.logprobs, strict=True)) < tolerance


def test_leaked_slots_still_kill_the_server(model_dir, ids):
    """The control: were the integration to lose slots, this is what would happen in all other tests."""
    with SGLangServer(model_dir("llama"), {}, {"TEST_KVGRAFT_LEAK": "1"}) as server:
        document = ids(200)
        server.generate(document, 1)
        with suppress(OSError):  # it may die before it answers
            with_leak = server.generate(ids(10) + document + ids(10), 1)
            assert with_leak["meta_info"]["cached_tokens"] == 200
        deadline = time.monotonic() + 900
        while server.is_running and time.monotonic() < deadline:
            time.sleep(0.5)
        assert not server.is_running
        assert "memory leak" in server.log()


def all_numbers(value):
    """The numbers of nested lists, in order."""
    if isinstance(value, list):
        return [number for each in value for number in all_numbers(each)]
    return [] if value is None else [value]


READ_OFF_THE_PROMPT = {
    "log-probabilities": (4, {"logprob_start_len": 200, "top_logprobs_num": 3, "token_ids_logprob": [5, 6]}),
    "scores": (0, {"token_ids_logprob": [5, 6, 7]}),  # what /v1/score sends
    "hidden states": (2, {"return_hidden_states": True}),
}
READ = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs", "output_token_ids_logprobs")


def test_what_is_read_off_the_prompt_is_that_of_a_server_without_copies(model_dir, ids):
    with SGLangServer(model_dir("llama"), {"--enable-return-hidden-states": None}) as server:
        donor = ids(300)
        for mode in ("graft", "off"):
            server.generate(donor, 1, cache_salt=mode)
        for what, (num_tokens, fields) in READ_OFF_THE_PROMPT.items():
            prompt = ids(40) + donor[20:] + ids(30)
            got, want = (
                server.generate(prompt, num_tokens, reuse=mode, cache_salt=mode, **fields)["meta_info"]
                for mode in ("graft", "off")
            )
            report = got["kvgraft"][0]["report"]
            assert (report["spans"], report["miss"]["reason"]) == ([], "model_refused"), what
            pairs = [(got.get(name), want.get(name)) for name in (*READ, "hidden_states")]
            numbers = [(one, two) for each in pairs for one, two in zip(*map(all_numbers, each), strict=True)]
            assert len(numbers) > 2
            assert max(abs(one - two) for one, two in numbers) < 1e-4, what
        prompt = ids(40) + donor[20:] + ids(30)
        answer = server.generate(prompt, 4, cache_salt="graft")["meta_info"]["kvgraft"][0]["report"]
        assert answer["shifted_tokens"] == 280, "values of the answer alone are those of the mode"


def test_hybrid_model_is_served_without_reuse(model_dir, ids, monkeypatch):
    with SGLangServer(model_dir("gemma3")) as server:
        monkeypatch.setenv("KVGRAFT_STATE_DIR", str(server.state_dir))
        assert "kvgraft serves this model without reuse: " in server.log()
        assert diagnose()["shifted_reuse"].startswith("refused: ")
        document = ids(300)
        first = server.generate(document + ids(5), 4)
        assert first["meta_info"]["cached_tokens"] == 0
        shifted = server.generate(ids(40) + document + ids(5), 4)
        assert shifted["meta_info"]["cached_tokens"] == 0
        assert "kvgraft" not in shifted["meta_info"]
        assert server.is_healthy()


def test_model_with_states_is_served_with_sglangs_own_cache(model_dir, ids, monkeypatch):
    with SGLangServer(model_dir("lfm2")) as server:
        monkeypatch.setenv("KVGRAFT_STATE_DIR", str(server.state_dir))
        said = [line for line in server.log().splitlines() if "kvgraft serves this model without reuse" in line]
        assert len(said) == 1
        assert "without reuse: Mamba or linear-attention layers (" in said[0]
        assert diagnose()["shifted_reuse"] == "refused: Mamba or linear-attention layers"
        document = ids(300)
        first = server.generate(document, 4)
        longer = server.generate(document + first["output_ids"] + ids(5), 4)
        assert longer["meta_info"]["cached_tokens"] >= 300
        assert "kvgraft" not in longer["meta_info"]
        assert not re.search(r'File "[^"]*kvgraft/', server.log()), "a traceback of ours"


@pytest.fixture(scope="class")
def script(tmp_path_factory):
    """What the provider of `small` answers, and how it is called."""
    return Script(tmp_path_factory.mktemp("script"))


@pytest.fixture(scope="class")
def small(model_dir, script):
    """A server whose pool holds little more than one prompt, with metrics and everything else on."""
    listener = Listener()
    options = {"--max-total-tokens": 1500, "--enable-metrics": None, "--kv-events-config": listener.config}
    environ = {
        "KVGRAFT_SEMANTIC_PROVIDER": "scripted_provider:Scripted",
        "KVGRAFT_SEMANTIC_DEADLINE_MS": "60000",
        FOLDER: str(script.folder),
    }
    with listener, SGLangServer(model_dir("llama"), options, environ) as server:
        server.listener = listener
        yield server


class TestSmallPool:
    """Tests that share one server, in order."""

    def test_backend_says_that_it_is_live(self, small, monkeypatch):
        monkeypatch.setenv("KVGRAFT_STATE_DIR", str(small.state_dir))
        assert "kvgraft is live in this scheduler: " in small.log()
        found = diagnose()
        assert found["backend"].startswith("live in process ")
        assert found["shifted_reuse"] == "accepted"

    def test_evicted_donor_is_grafted_from_host_memory(self, small, model_dir, ids, monkeypatch, capsys):
        reference = Reference(model_dir("llama"))
        donor = ids(30) + ids(500)
        small.generate(donor, 1)
        for _ in range(3):
            small.generate(ids(900), 1)
        tail = ids(20)
        got = small.generate(donor[50:480] + tail)
        meta = got["meta_info"]
        agrees(got, reference.answer([Copied(reference.cache_of(Fresh(donor)), 50, 430), Fresh(tail)]))
        assert meta["cached_tokens"] == 430
        assert meta["kvgraft"][0]["attempts"][0]["sources"][0]["tier"] == "host"
        monkeypatch.setenv("KVGRAFT_REPORT_FILE", str(small.report_path))
        assert main(["explain", "--request-id", meta["id"]]) == 0
        assert "430 of 450 prompt tokens copied from another position" in capsys.readouterr().out

    def test_another_text_stands_in_where_asked_for_and_is_never_published(self, small, model_dir, ids, script):
        reference = Reference(model_dir("llama"))
        stored = ids(200)
        small.generate(stored, 1)
        assert script.stored(stored)[-1]["token_ids"] == stored
        script.answer(stored, source_id="doc-7", metadata={"similarity": 0.83})
        query = ids(150)
        want = reference.answer([Copied(reference.cache_of(Fresh(stored)), 0, 149), Fresh(query[149:])])
        for _ in range(2):
            got = small.generate(query, reuse="substitute")
            report = got["meta_info"]["kvgraft"][0]["report"]
            assert report["substituted_tokens"] == 149
            assert report["substitution"] == {"source_id": "doc-7", "metadata": {"similarity": 0.83}}
            assert got["output_ids"] == want.tokens
        plain = reference.answer([Fresh(query)]).tokens
        assert small.generate(query, cache_salt="other", reuse="substitute")["output_ids"] == plain
        assert len(script.calls("miss")) == 3
        assert small.generate(query)["output_ids"] == plain
        assert not script.calls("miss")

    @pytest.mark.parametrize("shared", [1, 40])
    def test_a_stored_first_token_or_system_prompt_does_not_silence_the_provider(
        self, small, model_dir, ids, script, shared
    ):
        reference = Reference(model_dir("llama"))
        stored = ids(200)
        small.generate(stored, 1)
        script.answer(stored)
        query = stored[:shared] + ids(150)
        want = reference.answer([Copied(reference.cache_of(Fresh(stored)), 0, len(query) - 1), Fresh(query[-1:])])
        got = small.generate(query, reuse="substitute")
        report = got["meta_info"]["kvgraft"][0]["report"]
        assert (report["exact_tokens"], report["substituted_tokens"]) == (shared, 149)
        assert got["output_ids"] == want.tokens

    def test_a_contradiction_is_grafted_but_for_what_differs(self, small, ids, script):
        stored = ids(200)
        small.generate(stored, 1)
        script.answer(stored)
        report = small.generate(stored[:100] + ids(1) + stored[101:] + ids(3), reuse="substitute")["meta_info"]
        report = report["kvgraft"][0]["report"]
        assert (report["exact_tokens"], report["substituted_tokens"]) == (100, 0)
        assert report["shifted_tokens"] > 50
        assert all(span["target_start"] > 100 for span in report["spans"])

    def test_a_failing_provider_is_a_miss(self, small, model_dir, ids, script):
        script.answer([1, 2, 3], fails=True)
        query = ids(150)
        want = Reference(model_dir("llama")).answer([Fresh(query)])
        assert small.generate(query, reuse="substitute")["output_ids"] == want.tokens
        script.answer(None)

    def test_health_checks_never_reach_the_provider(self, small, script):
        script.calls()
        small.get("/health_generate")
        assert not script.calls()

    def test_a_wrong_mode_is_told_in_the_report(self, small, ids):
        report = small.generate(ids(40), reuse="words")["meta_info"]["kvgraft"][0]["report"]
        assert "must be off, exact, graft, substitute" in report["miss"]["detail"]

    def test_metrics_are_on_sglangs_own_endpoint(self, small):
        text = small.get("/metrics")
        lines = {line.split("{")[0]: line for line in text.splitlines() if line.startswith("kvgraft:")}
        assert {"kvgraft:live", "kvgraft:prompt_tokens_total", "kvgraft:graft_seconds_count"} <= set(lines)
        for kind, least in (("segment", 430), ("substituted", 4 * 149)):
            counted = [line for line in text.splitlines() if f'kind="{kind}"' in line and 'outcome="approx"' in line]
            assert sum(float(line.rsplit(" ", 1)[1]) for line in counted) >= least

    def test_events_tell_of_exact_text_alone(self, small, ids):
        """A router that hashes what it hears never expects K/V that attended to copies, or stand somewhere else."""
        salt = {"cache_salt": "no stand-in"}
        first, second, between = ids(150), ids(150), ids(60)
        head, tail = ids(30), ids(40)
        small.generate(first, 1, **salt)
        small.generate(second, 1, **salt)
        prompt = head + first + between + second + tail
        got = small.generate(prompt, **salt)
        assert got["meta_info"]["cached_tokens"] == 300
        small.settle()
        heard_to = len(small.listener.events)
        again = small.generate(ids(20) + between + tail, 1, **salt)
        assert again["meta_info"]["cached_tokens"] >= len(between), "what was computed between copies is a donor"
        paths = small.listener.stored_paths()
        assert heard_to
        assert ("no stand-in", tuple(head)) in paths
        told_of = [tokens for _, tokens in paths]
        assert all(tokens[: len(head) + 1] != tuple(prompt[: len(head) + 1]) for tokens in told_of), "behind a copy"
        assert not any(tokens[0] in (between[0], tail[0]) and len(tokens) > 1 for tokens in told_of), "from the middle"

    def test_flushed_cache_has_no_donors(self, small, ids):
        document = ids(200)
        small.generate(document, 1)
        assert small.flush()
        got = small.generate(ids(20) + document + ids(5), 1, cache_salt="no stand-in")
        assert got["meta_info"]["cached_tokens"] == 0
        assert small.is_healthy()


def test_two_tensor_parallel_ranks_load_the_same(model_dir, ids):
    reference = Reference(model_dir("llama"))
    options = {"--tp-size": 2, "--chunked-prefill-size": 256}
    with SGLangServer(model_dir("llama"), options, {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}) as server:
        assert server.log().count("kvgraft is live in this scheduler") == 2
        donor, head, tail = ids(30) + ids(400), ids(40), ids(20)
        server.generate(donor, 1)
        cache = reference.cache_of(Fresh(donor))
        got = server.generate(head + donor[50:250] + tail + donor[250:420] + tail)
        parts = [Fresh(head), Copied(cache, 50, 200), Fresh(tail), Copied(cache, 250, 170), Fresh(tail)]
        agrees(got, reference.answer(parts))
        assert got["meta_info"]["cached_tokens"] == 370
        server.settle()
        assert server.is_healthy()
        assert "disagree" not in server.log()
