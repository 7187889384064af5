"""A vLLM server of graft-tiny with the connector in it, as a process of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager, suppress

import psutil

from engines import PATIENT
from kvgraft.models import bundled_model_path

PATIENCE_S = 480
"""Generous for a busy machine: where ranks wait for one another for ever, this ends it, and leaves CI time to say so."""


@contextmanager
def http_server(log, environ=None, flags=(), **options):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    connector = {
        "kv_connector": "GraftConnector",
        "kv_connector_module_path": "kvgraft.integrations.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {**PATIENT, **options},
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(bundled_model_path())]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--enforce-eager", "--max-model-len", "4096", "--max-num-seqs", "4", "--block-size", "32"]
    command += ["--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(connector)]
    command += flags
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0-1",
        "VLLM_LOGGING_LEVEL": "INFO",
        **(environ or {}),
    }
    with log.open("w") as written:
        process = subprocess.Popen(
            command, env=environment, stdout=written, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _wait_until_ready(process, port, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        _end(process, log)


def _end(process, log):
    """End the server as users do, by a signal to it alone: a second one, from here and from it, kills its scheduler at once.

    Where the scheduler has not noticed that signal it gets another: one that comes while Python is about to wait for a lock
    waits for the next.
    """
    process.terminate()
    try:
        for _ in range(4):
            with suppress(subprocess.TimeoutExpired):
                process.wait(15)
                break
            if "EngineCore: trigger received" not in log.read_text():
                for child in psutil.Process(process.pid).children(recursive=True):
                    if "EngineCore" in " ".join(child.cmdline()):
                        child.terminate()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _wait_until_ready(process, port, log):
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(log.read_text()[-5000:])
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
        except OSError:
            time.sleep(0.5)
        else:
            return
    raise AssertionError("the server did not become ready")
