"""Eight clients on too small a pool: every answer given meanwhile is checked, and SGLang's own leak check stays silent.

The server retracts running requests at random (`SGLANG_TEST_RETRACT`), prefills in chunks of 256, and evicts all the time.
"""

from __future__ import annotations

import collections
import json
import random
import threading
import time
import urllib.request

import pytest
from models import VOCABULARY
from oracle import Oracle
from server import SGLangServer

from reference import Reference

pytestmark = pytest.mark.engine

SECONDS = 40
CLIENTS = 8
CHECKED = 150
OPTIONS = {"--max-total-tokens": 3500, "--chunked-prefill-size": 256}
RETRACT = {"SGLANG_TEST_RETRACT": "1"}


class Load:
    """Clients that send overlapping prompts, some of which go away before they have their answer."""

    def __init__(self, server):
        self.server = server
        rng = random.Random(3)
        self.documents = [[rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(80, 400))] for _ in range(10)]
        self.prompts, self.outputs, self.logprobs, self.namespaces = {}, {}, {}, {}
        self.events = collections.Counter()
        self.deadline = time.monotonic() + SECONDS

    def run(self):
        threads = [threading.Thread(target=self.client, args=(number,)) for number in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def client(self, number):
        rng, count = random.Random(number), 0
        while time.monotonic() < self.deadline:
            count += 1
            rid = f"client{number}-{count}"
            try:
                self.request(rng, rid)
            except OSError as error:
                self.events[type(error).__name__] += 1

    def request(self, rng, rid):
        prompt = self.prompt(rng)
        self.prompts[rid] = prompt
        self.namespaces[rid] = "tenant" if rng.random() < 0.15 else None
        is_streamed = rng.random() < 0.25
        body = {
            "rid": rid,
            "input_ids": prompt,
            "extra_key": self.namespaces[rid],
            "sampling_params": {
                "max_new_tokens": rng.choice([1, 4, 16, 48]),
                "temperature": 0,
                "ignore_eos": True,
            },
            "return_logprob": True,
            "stream": is_streamed,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.server.port}/generate",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        # Some clients leave in the queue, in prefill or in decode.
        patience = rng.choice([0.05, 0.3, 1.0, 120, 120, 120, 120, 120])
        with urllib.request.urlopen(request, timeout=patience) as response:
            if is_streamed and rng.random() < 0.5:
                response.read(40)
                self.events["left while streaming"] += 1
                return
            lines = response.read().decode().split("\n\n")
        answer = json.loads(lines[-3].removeprefix("data: ")) if is_streamed else json.loads(lines[0])
        meta = answer["meta_info"]
        if meta["finish_reason"]["type"] == "abort":
            self.events["aborted by the server"] += 1
            return
        self.outputs[rid] = answer["output_ids"]
        self.logprobs[rid] = [entry[0] for entry in meta["output_token_logprobs"]]
        self.events["answered"] += 1
        self.events["retractions"] += meta.get("num_retractions", 0)

    def prompt(self, rng):
        fresh = lambda most: [rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(1, most))]  # noqa: E731
        prompt = self.documents[0][:60] if rng.random() < 0.4 else fresh(60)
        for document in rng.sample(self.documents, rng.randrange(1, 4)):
            first = rng.randrange(0, len(document) // 2)
            prompt = prompt + document[first : first + rng.randrange(40, 400)]
            if rng.random() < 0.7:
                prompt = prompt + fresh(50)
        return (prompt + fresh(4))[:900]


@pytest.fixture(scope="module")
def stressed(model_dir):
    with SGLangServer(model_dir("llama"), OPTIONS, RETRACT) as server:
        load = Load(server)
        load.run()
        server.settle()  # idle: the moment at which SGLang counts its slots
        is_healthy = server.is_running and server.is_healthy()
        # The server ends here: what follows takes minutes of computing.
        return load, server.reports(), server.log(), is_healthy


def test_server_lives_and_nothing_leaked(stressed):
    load, _, log, is_healthy = stressed
    assert is_healthy, log[-4000:]
    assert "memory leak" not in log
    assert "failed; it goes on without" not in log
    assert load.events["answered"] > 50


def test_stress_reached_what_it_is_for(stressed):
    load, reports, _, _ = stressed
    attempts = [attempt for report in reports.values() for attempt in report["attempts"]]
    tiers = collections.Counter(source["tier"] for attempt in attempts for source in attempt["sources"])
    generations = {span["generation"] for attempt in attempts for span in attempt["spans"]}
    assert tiers["device"] > 20
    assert tiers["host"] > 20
    assert generations >= {0, 1}
    assert sum(attempt["prefill_steps"] > 2 for attempt in attempts) > 10
    assert sum(len(report["attempts"]) > 1 and report["attempts"][0]["spans"] != [] for report in reports.values()) > 3
    assert load.events["retractions"] > 10
    assert sum(report["outcome"] == "aborted" for report in reports.values()) > 3


def test_no_copy_crosses_namespaces(stressed):
    load, reports, _, _ = stressed
    for rid, report in reports.items():
        for attempt in report["attempts"]:
            for source in attempt["sources"]:
                assert load.namespaces[source["request"]] == load.namespaces[rid]


def test_every_answer_given_under_stress_is_right(stressed, model_dir):
    load, reports, _, _ = stressed
    oracle = Oracle(Reference(model_dir("llama")), reports, load.prompts, load.outputs)
    answered = sorted(load.outputs, key=lambda rid: (not reports[rid]["attempts"][-1]["spans"], rid))[:CHECKED]
    wrong = [rid for rid in answered if not oracle.explains(rid, load.logprobs[rid])]
    assert wrong == []
    assert sum(bool(reports[rid]["attempts"][-1]["spans"]) for rid in answered) > 30


@pytest.fixture(scope="module")
def stored(model_dir, tmp_path_factory):
    """The same load on a server that keeps little in host memory and everything in a directory."""
    folder = tmp_path_factory.mktemp("store")
    environ = {"KVGRAFT_STORE": f"file:{folder}", "KVGRAFT_HOST_BYTES": "2MiB", **RETRACT}
    with SGLangServer(model_dir("llama"), OPTIONS, environ) as server:
        load = Load(server)
        load.run()
        server.settle()
        is_healthy = server.is_running and server.is_healthy()
        return load, server.reports(), server.log(), is_healthy


def test_server_with_a_store_lives_and_nothing_leaked(stored):
    load, reports, log, is_healthy = stored
    assert is_healthy, log[-4000:]
    assert "memory leak" not in log
    assert "failed; it goes on without" not in log
    assert load.events["answered"] > 50
    sources = [source for report in reports.values() for attempt in report["attempts"] for source in attempt["sources"]]
    assert sum(source["request"] == "a store" for source in sources) > 10
    assert load.events["retractions"] > 10
