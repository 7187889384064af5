"""Web pages in a browser of this machine: what they may ask of a server without keys, and what of the page at /ui."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.server.conftest import FakeEngine, Server, exchange

from kvgraft.config import ServerConfig
from kvgraft.inspector import RequestHistory
from kvgraft.server import create_app

APP = "https://app.example.org"
JSON = (b"content-type", b"application/json")
HERE = (b"host", b"127.0.0.1:8000")


def ask(app, method, path, *headers, body=b"", local="127.0.0.1"):
    return asyncio.run(exchange(app, method, path, headers=headers, body=[body], local=local))


def origin(text):
    return (b"origin", text.encode())


def host(text):
    return (b"host", text.encode())


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/v1/completions", "/v1/sessions", "/v1/models"])
@pytest.mark.parametrize(
    "page", [APP, "null", "http://127.0.0.1:9000", "https://127.0.0.1:8000", "http://localhost:8000"]
)
def test_a_page_of_another_origin_is_refused(server, path, page):
    method = "GET" if path == "/v1/models" else "POST"
    headers = [HERE, origin(page), (b"content-type", b"text/plain")]
    reply = ask(server.app, method, path, *headers, body=b'{"prompt": "a"}')
    assert (reply.status, reply.error["code"]) == (403, "origin_not_allowed")
    assert "cors_origin" in reply.error["message"]
    assert (server.engine.num_resets, server.engine.prepared) == (0, [])


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_so_is_one_that_hides_its_origin(server, site):
    reply = ask(server.app, "POST", "/reset_prefix_cache", HERE, (b"sec-fetch-site", site.encode()))
    assert (reply.status, server.engine.num_resets) == (403, 0)


@pytest.mark.parametrize(
    "name", ["rebound.example.org:8000", "rebound.example.org", "127.0.0.1.example.org", "", "[::1", "1.2.3"]
)
@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/v1/completions", "/v1/models", "/"])
def test_a_page_whose_name_was_made_to_mean_this_machine_is_refused(server, name, path):
    method = "POST" if path in {"/reset_prefix_cache", "/v1/completions"} else "GET"
    reply = ask(server.app, method, path, host(name), JSON, body=b'{"prompt": "a"}')
    assert (reply.status, reply.error["code"]) == (403, "host_not_allowed")
    assert (server.engine.num_resets, server.engine.prepared) == (0, [])


def test_on_another_address_it_is_told_by_what_browsers_send_with_it(server):
    """Names of this machine are known to others: containers and probes use them."""
    name = "kvgraft.internal:8000"
    assert ask(server.app, "POST", "/reset_prefix_cache", host(name), local="192.0.2.7").status == 200
    page = [host(name), origin(f"http://{name}")]
    reply = ask(server.app, "POST", "/reset_prefix_cache", *page, local="192.0.2.7")
    assert (reply.status, reply.error["code"], server.engine.num_resets) == (403, "host_not_allowed", 1)


@pytest.mark.parametrize(
    "name",
    ["127.0.0.1:8000", "localhost", "LOCALHOST:8000", "[::1]:8000", "[::1]", "192.0.2.7:8000", "kv.localhost:8000"],
)
def test_addresses_and_names_that_nobody_else_can_have_are_let_in(server, name):
    assert ask(server.app, "GET", "/v1/models", host(name)).status == 200
    assert ask(server.app, "POST", "/reset_prefix_cache", host(name), origin(f"http://{name.lower()}")).status == 200


def test_without_a_browser_no_header_is_needed(server):
    assert ask(server.app, "POST", "/reset_prefix_cache", HERE).status == 200
    assert ask(server.app, "POST", "/reset_prefix_cache").status == 200  # HTTP/1.0 has no Host


@pytest.mark.parametrize("path", ["/health", "/metrics"])
def test_probes_may_call_it_by_any_name(server, path):
    assert ask(server.app, "GET", path, host("kvgraft.internal:8000")).status == 200


def test_the_address_that_is_listened_on_is_a_name_of_it(make_server):
    server = make_server(host="gpu-7.internal")
    assert ask(server.app, "GET", "/v1/models", host("gpu-7.internal:8000")).status == 200
    assert ask(server.app, "GET", "/v1/models", host("gpu-8.internal:8000")).status == 403


@pytest.mark.parametrize("allowed", [APP, "*"])
def test_pages_of_cors_origin_are_let_in(make_server, allowed):
    server = make_server(cors_origin=allowed)
    assert ask(server.app, "POST", "/reset_prefix_cache", HERE, origin(APP)).status == 200
    behind_a_proxy = [host("app.example.org"), origin(APP), (b"sec-fetch-site", b"same-origin")]
    assert ask(server.app, "POST", "/reset_prefix_cache", *behind_a_proxy).status == 200
    other = ask(server.app, "POST", "/reset_prefix_cache", HERE, origin("https://other.example.org"))
    assert other.status == (200 if allowed == "*" else 403)


def test_keys_are_all_that_is_needed_where_there_are_some(make_server):
    server = make_server(api_key="secret")
    page = [host("kv.example.org"), origin(APP)]
    assert ask(server.app, "POST", "/reset_prefix_cache", *page).status == 401
    assert ask(server.app, "POST", "/reset_prefix_cache", *page, (b"authorization", b"Bearer secret")).status == 200


@pytest.mark.parametrize("settings", [{}, {"api_key": "secret"}, {"ui_key": "secret"}])
@pytest.mark.parametrize("path", ["/ui/", "/ui/api/requests", "/ui/api/reports", "/ui"])
@pytest.mark.parametrize("allowed", [APP, "*"])
def test_the_page_of_the_inspector_is_for_no_other_page(settings, path, allowed):
    config = ServerConfig().updated(settings | {"cors_origin": allowed, "ui": True})
    app = create_app(FakeEngine(), config, None, None, RequestHistory())
    reply = ask(app, "GET", path, HERE, origin(APP), (b"authorization", b"Bearer secret"))
    assert not [name for name in reply.headers if name.startswith("access-control-")]
    preflight = [HERE, origin(APP), (b"access-control-request-method", b"GET")]
    reply = ask(app, "OPTIONS", path, *preflight)
    assert not [name for name in reply.headers if name.startswith("access-control-")]


def test_the_api_has_these_headers_still():
    app = Server(cors_origin="*").app
    assert ask(app, "GET", "/v1/models", HERE, origin(APP)).headers["access-control-allow-origin"] == "*"
