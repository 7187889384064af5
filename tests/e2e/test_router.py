"""`kvgraft router` in front of two `kvgraft serve`, all of them processes: text is found where it lies, at any offset."""

from __future__ import annotations

import json
import random
import socket
import time
import urllib.request
from contextlib import ExitStack, contextmanager

import pytest

from kvgraft.bench.server_process import ServerProcess

pytest.importorskip("zmq")
pytest.importorskip("msgspec")

WAIT_S = 120.0


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=WAIT_S) as response:
        return json.loads(response.read()), response.headers.get("x-kvgraft-worker")


def tokens(first, count):
    return [3 + (first + 7 * number) % 1500 for number in range(count)]


def until(condition, what):
    give_up = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < give_up, what
        time.sleep(0.05)


@contextmanager
def router_and_workers():
    """A router and its two workers by name."""
    ports = free_ports(4)
    with ExitStack() as stack:
        servers, workers = {}, []
        for number, name in enumerate(("one", "two")):
            events, replay = ports[2 * number : 2 * number + 2]
            ends = {"endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://*:{replay}"}
            options = ["--num-slots", "4000", "--kv-events", json.dumps(ends), "--announce-donors", "true"]
            servers[name] = stack.enter_context(ServerProcess(options))
            zmq = f"events=tcp://127.0.0.1:{events},replay=tcp://127.0.0.1:{replay}"
            workers += ["--worker", f"{servers[name].url},{zmq},name={name}"]
        yield stack.enter_context(ServerProcess(workers, command="router")), servers


@pytest.fixture(scope="module")
def routed():
    with router_and_workers() as each:
        yield each


def score(router, prompt, **fields):
    answer, _ = post(router.url + "/v1/score", {"prompt": prompt, **fields})
    return {name: (held["exact_tokens"], held["shifted_tokens"]) for name, held in answer["workers"].items()}


@pytest.mark.slow
def test_text_is_found_where_it_lies(routed):
    router, servers = routed
    document, other = tokens(0, 200), tokens(501, 200)
    for name, text in (("one", document), ("two", other)):
        post(servers[name].url + "/v1/completions", {"prompt": text, "max_tokens": 1})
    until(lambda: score(router, document)["one"][0] >= 190, "the text is known")
    until(lambda: score(router, other)["two"][0] >= 190, "the other text is known")
    moved = [*tokens(901, 37), *document, 5]
    exact, shifted = score(router, moved)["one"]
    assert exact < 16
    assert shifted >= 180
    assert score(router, moved)["two"] == (0, 0)
    for text, name in ((moved, "one"), ([*tokens(31, 20), *other, 9], "two")):
        answer, worker = post(router.url + "/v1/completions", {"prompt": text, "max_tokens": 1})
        assert worker == name
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 180


@pytest.mark.slow
def test_a_session_goes_on_where_it_is(routed):
    """Its second turn counts as a prefix there; for requests that accept no copies it counts for nothing."""
    router, servers = routed
    draws = random.Random(7)
    head, document, question, more = ([draws.randrange(3, 1500) for _ in range(count)] for count in (40, 200, 150, 15))
    first = [*head, *document, *question]
    post(servers["two"].url + "/v1/completions", {"prompt": document, "max_tokens": 1})
    until(lambda: score(router, document)["two"][0] >= 190, "the text is known")
    answer, _ = post(servers["two"].url + "/v1/completions", {"prompt": first, "max_tokens": 1})
    assert answer["kvgraft"]["shifted_tokens"] >= 150
    second = [*first, *more]

    def continued(**fields):
        answer, _ = post(router.url + "/v1/score", {"prompt": second, **fields})
        held = answer["workers"]["two"]
        return held["continued_tokens"], held["shifted_tokens"]

    until(lambda: continued()[0] >= 340, "the session is known")
    assert continued()[1] == 0
    for mode in ("exact", "off", "verified"):
        assert continued(kvgraft={"reuse": mode}) == (0, 0)
    assert continued(cache_salt="bob") == (0, 0)
    answer, worker = post(router.url + "/v1/completions", {"prompt": second, "max_tokens": 1})
    assert worker == "two"
    report = answer["kvgraft"]
    assert (report["continued_tokens"] >= 340, report["shifted_tokens"]) == (True, 0)


@pytest.mark.slow
def test_text_of_another_tenant_is_not_seen(routed):
    router, servers = routed
    secret = tokens(77, 150)
    post(servers["two"].url + "/v1/completions", {"prompt": secret, "max_tokens": 1, "cache_salt": "alice"})
    moved = [9, *secret, 5]
    until(lambda: score(router, moved, cache_salt="alice")["two"][1] >= 140, "her text is known to her")
    assert score(router, secret)["two"] == score(router, moved)["two"] == (0, 0)
    assert score(router, moved, cache_salt="bob")["two"] == (0, 0)


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_nobody_an_answer():
    document = tokens(0, 200)
    with router_and_workers() as (router, servers):
        post(servers["one"].url + "/v1/completions", {"prompt": document, "max_tokens": 1})
        until(lambda: score(router, document)["one"][0] >= 190, "the text is known")
        servers["one"].kill()
        for _ in range(3):
            answer, worker = post(router.url + "/v1/completions", {"prompt": [*document, 7], "max_tokens": 2})
            assert worker == "two"
            assert answer["usage"]["completion_tokens"] == 2
