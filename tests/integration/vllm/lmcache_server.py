"""An LMCache server on loopback, as a process of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(sys.prefix) / "lmcache"
"""Where `make test-vllm` puts LMCache and what vLLM's environment lacks of its needs."""

_START_S = 300.0


class LMCacheServer:
    """Context manager. `port` is the one that connectors are told.

    Args:
        chunk_size: Tokens per chunk; a multiple of vLLM's block size.
        log_path: Where its output goes.
    """

    def __init__(self, chunk_size, log_path):
        self.port, http_port = (_free_port() for _ in range(2))
        self._log_path = log_path
        arguments = {
            "--host": "127.0.0.1",
            "--port": self.port,
            "--http-port": http_port,
            "--chunk-size": chunk_size,
            "--l1-size-gb": 0.25,
            "--eviction-policy": "LRU",
            "--worker-reap-timeout-seconds": 0,  # never, however slow the machine is
            "--supported-transfer-mode": "auto",  # the default waits for CUDA
        }
        words = [str(word) for pair in arguments.items() for word in pair]
        self._command = [sys.executable, "-m", "lmcache.cli.main", "server", *words, "--disable-metrics"]

    def __enter__(self):
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), str(FOLDER)]))
        environ = {**os.environ, "PYTHONPATH": path, "LMCACHE_TRACK_USAGE": "false"}
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=subprocess.STDOUT, env=environ, start_new_session=True
            )
        deadline = time.monotonic() + _START_S
        while "Application startup complete" not in self._log():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                raise RuntimeError(f"the server did not start:\n{self._log()[-3000:]}")
            time.sleep(0.2)
        return self

    def __exit__(self, *_):
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
                self._process.wait(10)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue

    def _log(self):
        return self._log_path.read_text(errors="replace")


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
