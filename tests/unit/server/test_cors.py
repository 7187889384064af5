"""Web pages of other origins, as browsers let them in or not."""

from __future__ import annotations

import pytest

from kvgraft.config import ServerConfig
from kvgraft.errors import ConfigError

APP = "https://app.example.org"
ORIGIN = (b"origin", APP.encode())
PREFLIGHT = [
    ORIGIN,
    (b"access-control-request-method", b"POST"),
    (b"access-control-request-headers", b"authorization,content-type"),
]


def test_preflight_passes_without_a_key(make_server):
    reply = make_server(cors_origin=APP, api_key="secret").call("OPTIONS", "/v1/chat/completions", headers=PREFLIGHT)
    assert reply.status == 200
    assert reply.headers["access-control-allow-origin"] == APP
    assert "POST" in reply.headers["access-control-allow-methods"]
    assert "authorization" in reply.headers["access-control-allow-headers"].lower()


def test_answers_and_errors_can_be_read_by_the_page(make_server):
    server = make_server(cors_origin=f"http://localhost:3000,{APP}", api_key="secret")
    key = (b"authorization", b"Bearer secret")
    body = {"prompt": "a"}
    server.engine.failure = None
    for reply, status in [
        (server.post("/v1/completions", body, headers=[ORIGIN, key]), 200),
        (server.post("/v1/completions", body, headers=[ORIGIN]), 401),
        (server.post("/v1/completions", {"prompt": "a", "zzz": 1}, headers=[ORIGIN, key]), 400),
    ]:
        assert reply.status == status
        assert reply.headers["access-control-allow-origin"] == APP
        assert "x-kvgraft-report" in reply.headers["access-control-expose-headers"]
    server.engine.failure = ZeroDivisionError()
    reply = server.post("/v1/completions", body, headers=[ORIGIN, key])
    assert (reply.status, reply.headers["access-control-allow-origin"]) == (500, APP)


def test_any_origin(make_server):
    reply = make_server(cors_origin="*").get("/v1/models", headers=[ORIGIN])
    assert reply.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize("settings", [{}, {"cors_origin": "https://other.example.org"}])
def test_other_pages_are_not_let_in(make_server, settings):
    server = make_server(**settings)
    assert "access-control-allow-origin" not in server.get("/v1/models", headers=[ORIGIN]).headers
    assert server.call("OPTIONS", "/v1/chat/completions", headers=PREFLIGHT).status in {400, 403}


@pytest.mark.parametrize("origin", ["app.example.org", "https://app.example.org/", "ftp://x", ["*", "x"]])
def test_what_is_no_origin_is_refused(origin):
    with pytest.raises(ConfigError, match="origins such as https"):
        ServerConfig.from_dict({"cors_origin": origin})
