"""A vLLM server on a loopback port and a client that times its first token; needs the standard library only.

The server is `python -m vllm.entrypoints.openai.api_server` of a virtual environment of its own, whose whole process group
ends with the `with` block, however that is left.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

HOST = "127.0.0.1"
MODEL_NAME = "m"
COUNTED = re.compile(r'^kvgraft:prompt_tokens_total\{[^}]*kind="(prefix|continued|segment)"[^}]*\} (\S+)', re.MULTILINE)
"""Reused tokens by kind in the metrics of `GraftConnector`."""
METRICS_S = 0.2
"""Until a step's counts are in the metrics."""
MAX_MODEL_TOKENS = 20_000
NUM_LOGPROBS = 20
"""Alternatives of the first token that are asked for; the most that vLLM gives by default."""

_START_SECONDS = 600.0
_STOP_SECONDS = 20.0
_REQUEST_SECONDS = 300.0
_POLL_SECONDS = 0.2
_TAIL_LINES = 25

Json = dict[str, Any]


def stream_events(lines: Iterable[bytes]) -> Iterator[Json]:
    """Read the events of a stream as they come; `[DONE]` is none."""
    for line in lines:
        if line.startswith(b"data: {"):
            yield json.loads(line.removeprefix(b"data: "))


class ServerError(RuntimeError):
    """A server did not start, ended, or answered with an error; the message ends with what it printed last."""


def reason(error: ServerError) -> str:
    """A line for a table: the last error that the server named, else the first line of the message; without paths."""
    lines = str(error).splitlines()
    named = [line for line in lines[1:] if re.match(r"\w+(Error|Exception): ", line.strip())]
    return re.sub(r"(/[\w.+-]+){2,}", "...", (named or lines)[-1 if named else 0].strip())


class ProcessGroup:
    """A command in a process group of its own, which ends with the `with` block; its output goes to a temporary file.

    Args:
        command: Program and arguments.
        environ: Variables besides those of this process.
        ready_url: Answers with status 200 as soon as the command is ready.
    """

    def __init__(self, command: Sequence[str], ready_url: str, environ: Mapping[str, str] | None = None) -> None:
        self._command = list(command)
        self._environ = os.environ | dict(environ or {})
        self._ready_url = ready_url

    def __enter__(self) -> Self:
        self._log = tempfile.NamedTemporaryFile(prefix="kvgraft-server-", suffix=".log")
        self._process = subprocess.Popen(
            self._command, stdout=self._log, stderr=subprocess.STDOUT, env=self._environ, start_new_session=True
        )
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def group(self) -> int:
        """Number of the process group."""
        return self._process.pid

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Hold every process of the group still: the threads of an idle engine spin for a while."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def pause(self) -> None:
        """Hold every process of the group still until `resume`."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let every process of the group go on."""
        os.killpg(self._process.pid, signal.SIGCONT)

    def stop(self) -> None:
        """End every process of the group, held still or not: SIGTERM first, SIGKILL for those that are left."""
        for ending in (signal.SIGTERM, signal.SIGKILL):
            if self._is_gone():
                break
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, ending)
                os.killpg(self._process.pid, signal.SIGCONT)  # who is held still hears of the first one only then
            deadline = time.monotonic() + _STOP_SECONDS
            while not self._is_gone() and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
        self._log.close()

    def kill(self) -> None:
        """End every process of the group with SIGKILL."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def events(self, lines: Iterable[bytes]) -> Iterator[Json]:
        """Read a stream's events; raises `ServerError` for one that tells of an error."""
        for event in stream_events(lines):
            if "error" in event:
                raise ServerError(f"{event['error']}; it said:\n{self.tail()}")
            yield event

    def tail(self, lines: int = _TAIL_LINES) -> str:
        """Return what the command printed last."""
        return "\n".join(self.output().splitlines()[-lines:])

    def output(self) -> str:
        """Return all that the command printed."""
        return Path(self._log.name).read_text(errors="replace")

    def _is_gone(self) -> bool:
        self._process.poll()  # reaps the leader, which would count as alive otherwise
        try:
            os.killpg(self._process.pid, 0)
        except ProcessLookupError:
            return True
        return False

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ServerError(f"the server ended with code {self._process.returncode}; it said:\n{self.tail()}")
            if _answers(self._ready_url):
                return
            time.sleep(_POLL_SECONDS)
        raise ServerError(f"the server was not ready after {_START_SECONDS:.0f} s; it said:\n{self.tail()}")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How to start vLLM.

    Attributes:
        venv: Folder of the virtual environment that has it.
        model: Folder of the model.
        port: Loopback port.
        kv_transfer: The value of `--kv-transfer-config`, or None for none.
        dtype: `bfloat16` or `float32`.
        block_size: Tokens of a KV block; a multiple of 32.
        prefix_caching: Whether vLLM reuses exact prefixes itself.
        environ: Further environment variables.
        kv_events: The value of `--kv-events-config`, or None for none.
        max_model_tokens: Longest sequence, and tokens of an engine step.
        kv_dtype: Type of K/V, as `--kv-cache-dtype` takes it.
    """

    venv: Path
    model: Path
    port: int
    kv_transfer: Json | None = None
    dtype: str = "bfloat16"
    block_size: int = 128
    prefix_caching: bool = True
    environ: Mapping[str, str] = field(default_factory=dict)
    kv_events: Json | None = None
    max_model_tokens: int = MAX_MODEL_TOKENS
    kv_dtype: str = "auto"

    def command(self) -> list[str]:
        """The command line; every prompt fits into one engine step."""
        values = {
            "--model": self.model,
            "--served-model-name": MODEL_NAME,
            "--host": HOST,
            "--port": self.port,
            "--dtype": self.dtype,
            "--block-size": self.block_size,
            "--max-model-len": self.max_model_tokens,
            "--max-num-batched-tokens": self.max_model_tokens,
            "--max-num-seqs": 4,
            "--kv-cache-dtype": self.kv_dtype,
        }
        command = [str(self.venv / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"]
        command += [str(part) for pair in values.items() for part in pair]
        command += ["--enforce-eager", "--enable-prompt-tokens-details"]
        command.append("--enable-prefix-caching" if self.prefix_caching else "--no-enable-prefix-caching")
        if self.kv_transfer is not None:
            command += ["--kv-transfer-config", json.dumps(self.kv_transfer)]
        if self.kv_events is not None:
            command += ["--kv-events-config", json.dumps(self.kv_events)]
        return command

    def variables(self) -> dict[str, str]:
        """Environment variables: 2 GiB of KV, both cores."""
        return {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "0-1", **self.environ}


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one request.

    Attributes:
        seconds: From sending the request to its first token; to the whole answer where it was not streamed.
        prompt_tokens: Tokens of the prompt.
        cached_tokens: Those that the engine's scheduler did not compute, by its own count.
        logprobs: Of the most likely first tokens, by token id, the likeliest first.
        report: Our part of `kv_transfer_params`; only answers that were not streamed have it.
    """

    seconds: float
    prompt_tokens: int
    cached_tokens: int
    logprobs: dict[str, float]
    report: Json | None = None

    @property
    def first_token(self) -> str:
        """The likeliest first token."""
        return max(self.logprobs, key=self.logprobs.__getitem__)


class VLLMServer(ProcessGroup):
    """A running vLLM server and its completions."""

    def __init__(self, settings: ServerSettings) -> None:
        self._port = settings.port
        super().__init__(settings.command(), f"http://{HOST}:{settings.port}/health", settings.variables())

    def __enter__(self) -> Self:
        require_free(self._port)
        return super().__enter__()

    def stream(self, token_ids: Sequence[int], **fields: object) -> Answer:
        """Ask for one token; `fields` go into the request. The time is that to the first token."""
        body = _body(token_ids, 1, stream=True, stream_options={"include_usage": True}, **fields)
        started = time.perf_counter()
        seconds, logprobs, usage = 0.0, {}, {}
        for event in self._events(body):
            if event.get("choices") and not seconds:
                seconds = time.perf_counter() - started
                logprobs = _first_logprobs(event)
            usage = event.get("usage") or usage
        if not seconds:
            raise ServerError(f"the server gave no token; it said:\n{self.tail()}")
        return Answer(seconds, usage["prompt_tokens"], _cached(usage), logprobs)

    def complete(self, token_ids: Sequence[int], max_tokens: int = 4, **fields: object) -> Answer:
        """Ask for `max_tokens` at once; the time is that of the whole answer."""
        started = time.perf_counter()
        with self._response(_body(token_ids, max_tokens, **fields)) as response:
            answer = json.loads(response.read())
        report = (answer.get("kv_transfer_params") or {}).get("kvgraft")
        seconds = time.perf_counter() - started
        usage = answer["usage"]
        return Answer(seconds, usage["prompt_tokens"], _cached(usage), _first_logprobs(answer), report)

    def _events(self, body: bytes) -> Iterator[Json]:
        with self._response(body) as response:
            yield from self.events(response)

    @contextlib.contextmanager
    def _response(self, body: bytes) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(HOST, self._port, timeout=_REQUEST_SECONDS)
        try:
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise ServerError(f"status {response.status}: {response.read()[:2000].decode(errors='replace')}")
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{type(error).__name__}: {error}; the server said:\n{self.tail()}") from error
        finally:
            connection.close()


def timed_events(port: int, path: str, body: Json, timeout_s: float) -> list[tuple[float, Json]]:
    """Send JSON; returns the events of the answer's stream, each with the seconds from sending until it was there.

    Raises:
        ServerError: No answer, an empty one, or one that tells of an error.
    """
    content = json.dumps(body).encode()
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout_s)
    started = time.perf_counter()
    try:
        connection.request("POST", path, content, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            raise ServerError(f"status {response.status}: {response.read()[:2000].decode(errors='replace')}")
        found = [(time.perf_counter() - started, event) for event in stream_events(response)]
    except (OSError, http.client.HTTPException) as error:
        raise ServerError(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()
    if not found:
        raise ServerError("the answer is empty")
    if failed := [event["error"] for _, event in found if "error" in event]:
        raise ServerError(f"{failed[0]}")
    return found


def counted_tokens(url: str) -> int:
    """Return the reused tokens that the metrics of `GraftConnector` count at `url`, one engine step behind."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=_REQUEST_SECONDS) as response:
        return sum(int(float(count)) for _, count in COUNTED.findall(response.read().decode()))


def logprob_gap(cold: Answer, other: Answer, top: int = 5) -> float:
    """Largest difference in log-probability over the `top` likeliest first tokens of `cold`, in nats.

    A token that is not among those which `other` names counts with the least likely of them, so that the true gap is larger.
    """
    least = min(other.logprobs.values())
    likeliest = sorted(cold.logprobs.items(), key=lambda item: -item[1])[:top]
    return max(abs(value - other.logprobs.get(token, least)) for token, value in likeliest)


def package_versions(venv: Path, packages: Sequence[str]) -> dict[str, str]:
    """Versions that a virtual environment has; packages that it has not are left out."""
    code = (
        "import sys, json, importlib.metadata as m\n"
        "have = {d.metadata['Name'].lower(): d.version for d in m.distributions()}\n"
        "print(json.dumps({p: have[p] for p in sys.argv[1:] if p in have}))"
    )
    command = [str(venv / "bin" / "python"), "-c", code, *packages]
    versions: dict[str, str] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return versions


def require_free(port: int) -> None:
    """Raise `ServerError` if a process listens on the loopback port."""
    with socket.socket() as probe:
        probe.settimeout(1)
        if probe.connect_ex((HOST, port)) == 0:
            raise ServerError(f"port {port} is taken: give another with --port")


def _body(token_ids: Sequence[int], max_tokens: int, **fields: object) -> bytes:
    body = {
        "model": MODEL_NAME,
        "prompt": list(token_ids),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": NUM_LOGPROBS,
        "return_tokens_as_token_ids": True,
        **fields,
    }
    return json.dumps(body).encode()


def _first_logprobs(event: Json) -> dict[str, float]:
    logprobs: dict[str, float] = event["choices"][0]["logprobs"]["top_logprobs"][0]
    return logprobs


def _cached(usage: Json) -> int:
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == http.HTTPStatus.OK)
    except (urllib.error.URLError, OSError, http.client.HTTPException):
        return False
