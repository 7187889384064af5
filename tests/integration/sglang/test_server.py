"""Servers from start to end: refusals, controls, tiers, metrics, commands."""

from __future__ import annotations

import random
import time

import pytest
from models import VOCABULARY
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
        with_leak = server.generate(ids(10) + document + ids(10), 1)
        assert with_leak["meta_info"]["cached_tokens"] == 200
        deadline = time.monotonic() + 900
        while server.is_running and time.monotonic() < deadline:
            time.sleep(0.5)
        assert not server.is_running
        assert "memory leak" in server.log()


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


@pytest.fixture(scope="class")
def small(model_dir):
    """A server whose pool holds little more than one prompt, with metrics and everything else on."""
    options = {"--max-total-tokens": 1500, "--enable-metrics": None}
    environ = {"KVGRAFT_SEMANTIC_PROVIDER": "recall:Recall", "KVGRAFT_LOOKUP_DEADLINE_MS": "5000"}
    with SGLangServer(model_dir("llama"), options, environ) as server:
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

    def test_stand_in_of_a_provider_is_substituted_and_never_published(self, small, model_dir, ids):
        reference = Reference(model_dir("llama"))
        stored = ids(200)
        small.generate(stored, 1)
        query = ids(150)
        want = reference.answer([Copied(reference.cache_of(Fresh(stored)), 0, 149), Fresh(query[149:])])
        # The provider stands in tokens of another prompt: the K/V are those of `stored`.
        for rid in ("once", "again"):
            got = small.generate(query, rid=f"substituted-{rid}")
            attempt = got["meta_info"]["kvgraft"][0]["attempts"][0]
            assert attempt["substituted_tokens"] == 149
            assert got["output_ids"] == want.tokens
        plain = small.generate(query, cache_salt="other", rid="plain")
        assert plain["output_ids"] == reference.answer([Fresh(query)]).tokens

    def test_metrics_are_on_sglangs_own_endpoint(self, small):
        text = small.get("/metrics")
        lines = {line.split("{")[0]: line for line in text.splitlines() if line.startswith("kvgraft:")}
        assert {"kvgraft:live", "kvgraft:prompt_tokens_total", "kvgraft:graft_seconds_count"} <= set(lines)
        segment = [line for line in text.splitlines() if 'kind="segment"' in line and 'outcome="approx"' in line]
        assert sum(float(line.rsplit(" ", 1)[1]) for line in segment) >= 430 + 2 * 149

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
