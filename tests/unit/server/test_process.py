"""The process around the app: sockets, slow clients, signals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from kvgraft.errors import ConfigError
from kvgraft.http import process
from kvgraft.http.process import GracefulServer, bind

PATIENCE_S = 60.0


def serve_and(server, talk):
    """Serve the app on a free port, run `talk(port)`, stop; returns what `talk` did."""

    async def run():
        ready = asyncio.Event()
        graceful = GracefulServer(server.app, 0.0, ready.set)
        with bind("127.0.0.1", 0) as listener:
            port = listener.getsockname()[1]
            serving = asyncio.create_task(graceful.serve([listener]))
            async with asyncio.timeout(PATIENCE_S):
                await ready.wait()
                result = await talk(port)
                graceful.should_exit = True
                await serving
        return result

    return asyncio.run(run())


def test_head_that_does_not_end_closes_the_connection(server, monkeypatch):
    monkeypatch.setattr(process, "HEADER_TIMEOUT_S", 0.2)

    async def talk(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(b"GET /he")
            while not reader.at_eof():  # for ever, if it were not closed
                writer.write(b"a")
                await asyncio.sleep(0.02)
            return True
        finally:
            writer.close()

    assert serve_and(server, talk)


@pytest.mark.parametrize(("pause_s", "timeout_s"), [(0.0, PATIENCE_S), (0.7, 0.5)])
def test_second_request_of_a_connection_is_answered_whatever_the_first_took(server, monkeypatch, pause_s, timeout_s):
    monkeypatch.setattr(process, "HEADER_TIMEOUT_S", timeout_s)

    async def talk(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(int(line[16:]) for line in head.split(b"\r\n") if line.startswith(b"content-length: "))
            await reader.readexactly(length)
            await asyncio.sleep(pause_s)
        writer.close()
        return head.split(b"\r\n")[0]

    assert serve_and(server, talk) == b"HTTP/1.1 200 OK"


BODY = b'{"prompt": "x"}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
WHOLE = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY


async def said_to(port, request, *, closes):
    """All that is answered to a client that sends `request`, and closes its half of the connection or waits for the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        if closes:
            writer.write_eof()
        return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize("request_", [WHOLE, HEAD + b"Content-Length: 99\r\n\r\n" + BODY])
def test_a_client_that_closes_its_half_is_told_why_it_gets_no_answer(server, request_):
    """It cannot be told from one that has left, whose request is cancelled."""
    server.engine.hold_at = 0
    answer = serve_and(server, lambda port: said_to(port, request_, closes=True))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"connection: close" in head.lower()
    assert b"content-length: %d" % len(body) in head.lower()
    error = json.loads(body)["error"]
    assert error["code"] == "client_closed"
    assert "keep the connection open until the answer has come" in error["message"]
    assert len(server.engine.cancelled) == (request_ == WHOLE)


def test_a_stream_whose_client_closes_its_half_ends(server):
    server.engine.hold_at = 2

    async def talk(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = b'{"prompt": "x", "stream": true}'
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        first = await reader.readuntil(b"\r\n\r\n")
        writer.write_eof()
        rest = await reader.read()
        writer.close()
        return first, rest

    first, rest = serve_and(server, talk)
    assert first.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1" not in rest
    assert len(server.engine.cancelled) == 1


def test_a_connection_that_ends_between_requests_gets_nothing(server):
    assert serve_and(server, lambda port: said_to(port, b"", closes=True)) == b""


def test_a_body_whose_length_is_said_twice_ends_the_connection(server):
    smuggled = b"0\r\n\r\nPOST /reset_prefix_cache HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    request = HEAD + b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n" % len(smuggled) + smuggled
    answer = serve_and(server, lambda port: said_to(port, request, closes=False))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1") == 1
    assert server.engine.num_resets == 0


def test_signal_drains_and_is_not_raised_again(server):
    async def talk(_port):
        os.kill(os.getpid(), signal.SIGTERM)
        while not server.engine.closed_with:
            await asyncio.sleep(0.01)

    serve_and(server, talk)
    assert server.engine.closed_with == [0.0]


def test_engine_that_fails_to_close_does_not_keep_the_process(server):
    async def close(grace_s):
        server.engine.closed_with.append(grace_s)
        raise ZeroDivisionError

    async def talk(_port):
        os.kill(os.getpid(), signal.SIGINT)
        while not server.engine.closed_with:
            await asyncio.sleep(0.01)

    server.engine.close = close
    serve_and(server, talk)


@pytest.mark.parametrize("host", ["256.1.1.1", "no host", "192.0.2.1"])
def test_address_that_is_not_ours_is_a_config_error(host):
    with pytest.raises(ConfigError, match="check --host and --port"):
        bind(host, 0)


def test_port_in_use_is_a_config_error():
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(ConfigError, match="choose another --port"):
        bind("127.0.0.1", other.getsockname()[1])


@pytest.mark.parametrize(
    ("module", "hidden"),
    [
        ("kvgraft.server", "starlette"),
        ("kvgraft.observability.prometheus", "prometheus_client"),
    ],
)
def test_missing_extra_is_named(module, hidden):
    code = f"import sys; sys.modules[{hidden!r}] = None\nfrom {module} import *"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = result.stderr.strip().splitlines()[-1]
    assert last == f"ImportError: {module} needs {hidden}: pip install 'kvgraft[server]'"
