"""What the app tells of HTTP requests to whoever makes spans of them."""

from __future__ import annotations

import pytest
from tests.unit.server.conftest import Server

from kvgraft.config import ServerConfig
from kvgraft.errors import OverloadedError, RequestError
from kvgraft.server import create_app


class Traces:
    """Keeps what it is told."""

    def __init__(self):
        self.exchanges = []

    def record_exchange(self, exchange):
        self.exchanges.append(exchange)


@pytest.fixture
def traced():
    server = Server()
    server.traces = Traces()
    server.app = create_app(server.engine, ServerConfig(), server.metrics, server.traces)
    return server


def the_only(server):
    (exchange,) = server.traces.exchanges
    return exchange


def test_answer_names_its_choices_and_prompts(traced):
    answer = traced.complete(["one", "two"], n=2, max_tokens=2, temperature=0.5).json
    exchange = the_only(traced)
    assert (exchange.method, exchange.route, exchange.status, exchange.error) == ("POST", "/v1/completions", 200, None)
    assert exchange.asked.answer_id == answer["id"]
    assert exchange.asked.choices == tuple((f"{answer['id']}-{index}", index // 2) for index in range(4))
    assert (exchange.asked.max_tokens, exchange.asked.temperature, exchange.asked.reuse) == (2, 0.5, "graft")
    assert exchange.started < exchange.ended


def test_context_of_the_client_is_taken_over(traced):
    headers = [
        (b"traceparent", b"00-a-b-01"),
        (b"tracestate", b"x=1"),
        (b"tracestate", b"y=2"),
        (b"x-request-id", b"me"),
    ]
    traced.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}, headers=headers)
    exchange = the_only(traced)
    assert (exchange.traceparent, exchange.tracestate, exchange.request_id) == ("00-a-b-01", "x=1,y=2", "me")


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models", "/nothing", "/v1/completions/else"])
def test_other_paths_are_not_told_of(traced, path):
    traced.get(path)
    assert traced.traces.exchanges == []


def test_refused_body_is_told_without_its_text(traced):
    traced.complete("my secret", model="my secret")
    exchange = the_only(traced)
    assert (exchange.status, exchange.error, exchange.asked) == (404, "model_not_found", None)
    assert "secret" not in str(exchange)


def test_request_that_the_engine_has_no_room_for(traced):
    traced.engine.failure = OverloadedError("full")
    assert traced.complete().status == 429
    exchange = the_only(traced)
    assert exchange.status == 429
    assert exchange.error
    assert not exchange.has_failed


@pytest.mark.parametrize("stream", [False, True])
def test_failure_of_the_engine_is_the_servers(traced, stream):
    traced.engine.failure, traced.engine.fail_at = RequestError("the engine failed: my secret"), 2
    traced.complete(stream=stream)
    exchange = the_only(traced)
    assert exchange.status == (200 if stream else 500)
    assert exchange.has_failed
    assert "secret" not in str(exchange)


def test_client_that_left_is_no_failure(traced):
    traced.engine.hold_at = 2
    traced.post("/v1/completions", {"prompt": "x", "stream": True}, leave_after=1)
    exchange = the_only(traced)
    assert (exchange.status, exchange.error, exchange.has_failed) == (None, "client_disconnected", False)
