"""`kvgraft explain --server`: reports of a running server, and one line where there are none to be had."""

from __future__ import annotations

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest
from tests.unit.explain.test_requests import report, span

from kvgraft.cli import main
from kvgraft.errors import ConfigError
from kvgraft.explain.live import read_server

KEY = "secret"


class Page(BaseHTTPRequestHandler):
    """The page's endpoint over two requests, behind a key."""

    entries = (
        {"request_id": "first", "outcome": "stop", "output_tokens": 4, "attempts": [report(350)]},
        {"request_id": "second", "outcome": "stop", "output_tokens": 5, "attempts": [report(350, 30, [span(30, 300)])]},
    )
    elsewhere = ""

    def do_GET(self):
        """Answer as the inspector does."""
        url = urlsplit(self.path)
        status, headers, told = 404, {}, b"Not Found"
        if self.elsewhere:
            status, headers = 307, {"Location": self.elsewhere}
        elif url.path == "/ui/api/reports" and self.headers.get("Authorization") != f"Bearer {KEY}":
            status = 401
        elif url.path == "/ui/api/reports":
            text = parse_qs(url.query).get("text", [""])[0]
            status, told = 200, json.dumps([each for each in self.entries if text in each["request_id"]]).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(told)

    def log_message(self, *_):
        """Say nothing."""


@pytest.fixture
def serve():
    servers = []

    def start(page=Page):
        server = ThreadingHTTPServer(("127.0.0.1", 0), page)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("end", ["", "/", "/ui", "/ui/"])
def test_requests_of_a_server_are_read_in_their_order(serve, end):
    found = read_server(serve() + end, key=KEY)
    assert [request.request_id for request in found] == ["first", "second"]
    assert found[1].last.runs[1].length == 300
    (one,) = read_server(serve(), key=KEY, name="sec")
    assert one.request_id == "second"


def test_the_command_shows_one_and_lists_all(serve, monkeypatch, capsys):
    url = serve()
    monkeypatch.setenv("KVGRAFT_UI_KEY", KEY)
    assert main(["explain", "--server", url, "--request-id", "second"]) == 0
    assert capsys.readouterr().out.startswith("request second: stop, 5 tokens generated\n")
    assert main(["explain", "--server", url]) == 0
    assert len(capsys.readouterr().out.splitlines()) >= 2
    assert main(["explain", "--server", url, "--diff", "first", "second"]) == 0
    assert main(["explain", "--server", url, "--file", "x.json"]) == 2
    assert "give one" in capsys.readouterr().err


def test_what_cannot_be_asked_is_told_in_one_line(serve):
    url = serve()
    for asked, options, told in (
        (url, {}, "the page's key is needed; set KVGRAFT_UI_KEY"),
        (url, {"key": KEY, "name": "third"}, "knows no request third; it keeps the last ones"),
        (f"{url}/v1", {"key": KEY}, "it has no page; start it with --ui"),
        ("http://127.0.0.1:9", {}, "cannot be asked"),
        ("file:///etc/passwd", {}, "a server is named by a URL"),
        ("127.0.0.1:8000", {}, "a server is named by a URL"),
    ):
        with pytest.raises(ConfigError, match=told) as refused:
            read_server(asked, **options)
        assert "\n" not in str(refused.value)


def test_the_key_goes_to_nobody_else(serve):
    asked = []

    class Other(Page):
        def do_GET(self):
            asked.append(self.headers.get("Authorization"))
            super().do_GET()

    other = serve(Other)
    away = type("Away", (Page,), {"elsewhere": f"{other}/ui/api/reports"})
    with pytest.raises(ConfigError, match="it answered 307"):
        read_server(serve(away), key=KEY)
    assert asked == []


def answering(reply):
    """A server that answers one request with these bytes, as one that is killed does; its URL."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer():
        with listener, listener.accept()[0] as client:
            client.recv(1 << 16)
            client.sendall(reply)

    threading.Thread(target=answer, daemon=True).start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"garbage\r\n\r\n",
        b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n[{"request_id"',
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n[{",
        b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>",
    ],
)
def test_one_that_gives_no_whole_answer_is_told_of_in_a_line(capsys, reply):
    url = answering(reply)
    assert main(["explain", "--server", url]) == 2
    told = capsys.readouterr().err
    assert url in told
    assert told.count("\n") == 1
