"""Donors among SGLang's events, and `kvgraft heal`: what it has SGLang compute alone replaces what attended to copies."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
from contextlib import suppress

import pytest
from models import VOCABULARY
from server import SGLangServer

# SGLang warns while it is imported on a CPU.
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


def ids(seed, count):
    rng = random.Random(seed)
    return [rng.randrange(3, VOCABULARY) for _ in range(count)]


HEAD, OTHER_HEAD, THIRD_HEAD = ids(1, 30), ids(2, 50), ids(3, 20)
DOCUMENT, NOVEL, QUESTION = ids(4, 300), ids(5, 200), ids(7, 40)


def free_ports(count):
    """Below those that the system gives to who asks for any: SGLang takes a dozen of these while it starts."""
    found = []
    for port in random.sample(range(31600, 31800), 200):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError("no free ports")


def spans_of(server, prompt, **fields):
    answer = server.generate(prompt, 1, **fields)
    return answer["meta_info"]["kvgraft"][0]["report"]["spans"]


def fidelities_of(server, prompt):
    return fidelities_in(server.generate(prompt, 1)["meta_info"])


def fidelities_in(meta_info):
    return {span["fidelity"] for span in meta_info["kvgraft"][0]["report"]["spans"]}


def test_kvgraft_heal_replaces_what_was_computed_behind_copies(model_dir):
    events, replay = free_ports(2)
    config = {"publisher": "zmq", "endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://*:{replay}", "topic": ""}
    options = {"--kv-events-config": json.dumps(config)}
    with SGLangServer(model_dir("llama"), options, {"KVGRAFT_ANNOUNCE_DONORS": "true"}) as server:
        for salt in (None, "tenant"):
            salted = {"cache_salt": salt} if salt else {}
            server.generate(HEAD + DOCUMENT, 1, **salted)
            (span,) = spans_of(server, OTHER_HEAD + DOCUMENT + NOVEL, **salted)
            assert (span["generation"], span["length"]) == (0, len(DOCUMENT))
        session = OTHER_HEAD + DOCUMENT + NOVEL + QUESTION
        assert fidelities_of(server, session) == {"continued"}
        (before,) = spans_of(server, THIRD_HEAD + NOVEL[:150])
        assert before["generation"] == 1
        server.settle()
        command = [sys.executable, "-m", "kvgraft", "heal", "--once", "--idle-s", "0.5"]
        command += ["--url", f"http://127.0.0.1:{server.port}"]
        command += ["--events", f"tcp://127.0.0.1:{events},replay=tcp://127.0.0.1:{replay}"]
        healed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
        assert healed.returncode == 0, healed.stderr
        last = healed.stderr.strip().splitlines()[-1]
        assert "interrupted=0 refused=0 failed=0 open=0 private=1" in last, healed.stderr
        assert "healed_texts=0" not in last, healed.stderr
        assert "healed_in_place=0" not in last, healed.stderr
        going_on = server.generate(session + ids(8, 20), 1)["meta_info"]
        assert fidelities_in(going_on) == set(), "all before what is new is an exact prefix"
        assert going_on["cached_tokens"] >= len(session) - 1, healed.stderr
        (after,) = spans_of(server, ids(6, 35) + NOVEL[:150])
        assert after["generation"] == 0
        again = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
        assert "healed_texts=0" in again.stderr, "what is exact is not computed again"


def test_a_server_that_publishes_no_events_announces_nothing_and_says_so(model_dir):
    with pytest.raises(RuntimeError, match="announce_donors announces donors among SGLang's KV events"):
        SGLangServer(model_dir("llama"), {}, {"KVGRAFT_ANNOUNCE_DONORS": "true"}).__enter__()
