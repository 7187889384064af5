"""The process around the app: sockets, slow clients, signals."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys

import pytest

from kvgraft.errors import ConfigError
from kvgraft.server import process
from kvgraft.server.process import GracefulServer, bind

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
