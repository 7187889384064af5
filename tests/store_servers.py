"""Real servers for tests of remote stores, on loopback, as processes that end with the test."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

PATIENCE_S = 120.0


MOONCAKE_TESTS = "KVGRAFT_TEST_MOONCAKE"
"""Environment variable under which tests start Mooncake servers."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def need_redis() -> None:
    """Skip, saying what is missing."""
    if importlib.util.find_spec("redis") is None:
        pytest.skip("redis-py is not installed: pip install 'kvgraft[redis]'")
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed: apt-get install redis-server")


def need_mooncake() -> None:
    """Skip, saying what is missing; and in a run of everything, where other tests take the time that its threads need."""
    if not os.environ.get(MOONCAKE_TESTS):
        pytest.skip("`make test-mooncake` runs these")
    if importlib.util.find_spec("mooncake") is None:
        pytest.skip("Mooncake is not installed: pip install 'kvgraft[mooncake]'")
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        pytest.skip(f"Mooncake needs libraries of the system: {error}")


class Server(ABC):
    """A process that can be killed, stopped for a while, and started again at its port."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.port = port
        self._process: subprocess.Popen | None = None

    @abstractmethod
    def command(self) -> list[str]:
        """The program and its arguments."""

    @abstractmethod
    def is_ready(self) -> bool:
        """Whether it answers."""

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.kill()

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(self.command(), cwd=self.folder, stdout=log, stderr=log)
        end = time.monotonic() + PATIENCE_S
        while not self.is_ready():
            assert self._process.poll() is None, (self.folder / "log").read_text()[-2000:]
            assert time.monotonic() < end, "the server does not answer"
            time.sleep(0.02)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None, "not started"
        self._process.send_signal(number)


class RedisServer(Server):
    def __init__(self, folder: Path, *options: str) -> None:
        super().__init__(folder, free_port())
        self._options = options
        self.password = options[options.index("--requirepass") + 1] if "--requirepass" in options else None

    def command(self):
        where = ("--port", str(self.port), "--bind", "127.0.0.1", "--unixsocket", str(self.folder / "socket"))
        return ["redis-server", *where, "--save", "", "--appendonly", "no", "--maxmemory", "512mb", *self._options]

    def is_ready(self) -> bool:
        import redis

        try:
            with self.client() as client:
                return client.ping()
        except redis.RedisError:
            return False

    def client(self):
        import redis

        return redis.Redis(port=self.port, password=self.password, protocol=2)

    def url(self, **options: object) -> str:
        query = "&".join(f"{name}={value}" for name, value in options.items())
        return f"redis://127.0.0.1:{self.port}/0?{query}"


class MooncakeMaster(Server):
    def __init__(self, folder: Path, *options: str) -> None:
        super().__init__(folder, free_port())
        self.admin_port = free_port()
        self._options = options

    def command(self):
        ports = (f"--rpc_port={self.port}", f"--metrics_port={self.admin_port}")
        where = ("--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1")
        return [sys.executable, "-m", "mooncake.cli", *ports, *where, *self._options]

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.admin_port}/health", timeout=5) as answer:
                return json.load(answer)["service_ready"]
        except OSError:
            return False

    def url(self, **options: object) -> str:
        query = "&".join(f"{name}={value}" for name, value in options.items())
        return f"mooncake://127.0.0.1:{self.port}?admin_port={self.admin_port}&{query}"
