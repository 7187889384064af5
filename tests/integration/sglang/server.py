"""A stock SGLang server on this machine's CPU, as a process of its own."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

STANDINS = Path(__file__).parent / "standins"
SHARED_STANDINS = Path(__file__).parents[2] / "standins"
_PORTS = range(31800, 31900)
_START_S = 900.0
"""A quiet machine takes half a minute, nearly all of it imports; a busy one took five."""
_ANSWER_S = 900.0
"""Nothing here waits for a machine to be fast."""
_ROUNDS = 10
_OPTIONS = {
    "--device": "cpu",
    "--attention-backend": "torch_native",
    "--grammar-backend": "none",
    "--dtype": "float32",
    "--mem-fraction-static": "0.8",  # of what is free when it starts, whatever else takes memory then; tokens are the bound
    "--max-running-requests": "16",
    "--chunked-prefill-size": "8192",
    "--context-length": "8192",
    "--max-total-tokens": "12000",
}
FLAGS = (
    "--disable-cuda-graph",
    "--skip-server-warmup",
    "--skip-tokenizer-init",
    "--enable-cache-report",
    "--sleep-on-idle",
)


class SGLangServer:
    """Context manager that starts a server and ends it with all its processes.

    Args:
        model: Directory.
        options: Of `sglang.launch_server`, over the defaults; a value of None is a flag without a value.
        environ: Variables besides those of this process; `KVGRAFT_STATE_DIR` and `KVGRAFT_REPORT_FILE` are set.
        backend: `--radix-cache-backend`, or None for SGLang's own cache.
        flags: Without a value.
    """

    def __init__(self, model, options=None, environ=None, backend="kvgraft", flags=FLAGS):
        self._folder = tempfile.TemporaryDirectory(prefix="kvgraft-sglang-")
        folder = Path(self._folder.name)
        self.log_path, self.report_path, self.state_dir = folder / "log", folder / "reports.jsonl", folder / "state"
        self.port, self.num_ranks = 0, int((options or {}).get("--tp-size", 1))
        chosen = {**_OPTIONS, **({"--radix-cache-backend": backend} if backend else {}), **(options or {})}
        words = [word for name, value in chosen.items() for word in ([name] if value is None else [name, str(value)])]
        self._command = [sys.executable, "-m", "sglang.launch_server", "--model-path", model, "--host", "127.0.0.1"]
        self._command += [*flags, *words]
        path = os.pathsep.join(filter(None, [str(STANDINS), str(SHARED_STANDINS), os.environ.get("PYTHONPATH", "")]))
        self._environ = {
            **os.environ,
            "SGLANG_USE_CPU_ENGINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": path,
            "KVGRAFT_REPORT_FILE": str(self.report_path),
            "KVGRAFT_STATE_DIR": str(self.state_dir),
            "KVGRAFT_SELECTION": "none",  # whatever is copied stays
            "KVGRAFT_REPAIR_BELOW_MARGIN": "0",  # tiny models are sure of no token
            "KVGRAFT_PHASE_COST_TOKENS": "32",  # short texts are worth a step to tests
            "KVGRAFT_LOOKUP_DEADLINE_MS": "900000",  # a lookup on a busy machine is no miss
            **(environ or {}),
        }

    def __enter__(self):
        self.port = _free_port()  # of servers made beforehand, each takes one that the others have left
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [*self._command, "--port", str(self.port)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environ,
                start_new_session=True,
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self.stop()
        self._folder.cleanup()

    @property
    def is_running(self):
        return self._process.poll() is None

    def log(self):
        return self.log_path.read_text(errors="replace")

    def reports(self):
        """Reports by request id."""
        lines = self.report_path.read_text().splitlines() if self.report_path.exists() else []
        return {entry["request_id"]: entry for entry in map(json.loads, lines)}

    def is_healthy(self):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=_ANSWER_S) as response:
                return response.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def get(self, path):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=_ANSWER_S) as response:
            return response.read().decode()

    def settle(self):
        """Let the scheduler come to rest and look after its slots: each question takes it once round its loop."""
        for _ in range(_ROUNDS):
            self.get("/server_info")

    def flush(self):
        """Empty the cache as soon as nothing runs."""
        return self.post_raw(f"/flush_cache?timeout={_ANSWER_S}")

    def post_raw(self, path, body=None):
        """Whether a POST succeeds."""
        data = b"" if body is None else json.dumps(body).encode()
        headers = {} if body is None else {"content-type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers, method="POST")
        with urllib.request.urlopen(request, timeout=_ANSWER_S) as response:
            return response.status == 200

    def stream(self, tokens, num_tokens, **fields):
        """Yield the answer of `/generate` as far as it has come, again and again."""
        sampling = {"max_new_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": tokens, "sampling_params": sampling, "stream": True, **fields}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/generate", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=_ANSWER_S) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))

    def post(self, path, body, timeout=_ANSWER_S):
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return json.loads(response.read())

    def generate(self, tokens, num_tokens=16, *, reuse=None, **fields):
        """Answer of `/generate`, greedy, with log-probabilities."""
        sampling = {"max_new_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        if reuse is not None:
            sampling["custom_params"] = {"kvgraft": reuse}
        body = {"input_ids": tokens, "sampling_params": sampling, "return_logprob": True, **fields}
        return self.post("/generate", body)

    def pause(self):
        """Hold every process still until `resume`."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self):
        """Let every process go on."""
        os.killpg(self._process.pid, signal.SIGCONT)

    def kill(self):
        """End every process at once, as the kernel does when memory is short."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self):
        """End every process of the server's group."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
                self.resume()  # one that is held still hears of it only then
            except ProcessLookupError:
                break
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                continue
            time.sleep(0.2)

    def _wait_until_ready(self):
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            if not self.is_running:
                raise RuntimeError(f"the server ended with {self._process.returncode}:\n{self.log()[-3000:]}")
            if self.is_healthy():
                return
            time.sleep(0.3)
        raise RuntimeError(f"the server was not ready after {_START_S:.0f} s:\n{self.log()[-3000:]}")


def _free_port():
    # Another process may look at the same time; it begins elsewhere.
    for port in random.Random(os.getpid()).sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port")
