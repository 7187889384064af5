"""Servers of three engines, each off, with its own exact prefix cache and with kvgraft, behind one form of question.

All load the same directory in float32, compute on the same number of threads and keep K/V of about as many tokens. `off` is
an engine that reuses nothing, `exact` is the engine as it comes, `kvgraft` is `exact` with our connector, backend or engine
and its default settings. Token counts are those of the engine, or of kvgraft's report where that is more precise: vLLM
counts tokens that are repaired as cached ones, and its streams have no report, so that our metrics are read.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from vllm_server import (
    HOST,
    METRICS_S,
    MODEL_NAME,
    Json,
    ProcessGroup,
    ServerError,
    ServerSettings,
    counted_tokens,
    require_free,
    timed_events,
)
from vllm_ttft import CONNECTOR

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

VARIANTS = ("off", "exact", "kvgraft")
SEAM = "seam"
"""Of vLLM alone: `exact` with a connector that does nothing."""
IDLE_CONNECTOR = {"kv_connector": "IdleConnector", "kv_connector_module_path": "idle_connector", "kv_role": "kv_both"}
_TOKENS_PER_GIB = 23_000
"""Of SmolLM2-135M in float32, about."""

_ROOT = Path(__file__).parents[2]
_SGLANG_STANDINS = (_ROOT / "tests/integration/sglang/standins", _ROOT / "tests/standins")
_ANSWER_SECONDS = 900.0


@dataclass(frozen=True, slots=True)
class Site:
    """What servers of a run share.

    Attributes:
        model: Folder of the model.
        threads: That every engine computes on.
        max_tokens: Longest sequence.
        folder: For what servers leave behind.
        host_bytes: Host memory of donors; None is each engine's default.
        kv_tokens: That K/V have room for; vLLM takes whole GiB, one at least.
        root: Folder of the environments `.venv`, `.venv-vllm` and `.venv-sglang`.
        store: Of donors, as the setting of that name; none by default.
    """

    model: Path
    threads: int
    max_tokens: int
    folder: Path
    host_bytes: str | None = None
    kv_tokens: int = _TOKENS_PER_GIB
    root: Path = _ROOT
    store: str = ""

    def settings(self) -> dict[str, str]:
        """Settings of kvgraft for this site that are not the defaults, by name."""
        return {name: value for name, value in (("host_bytes", self.host_bytes), ("store", self.store)) if value}

    def python(self, venv: str) -> str:
        """Interpreter of an environment; raises `ServerError` if it is not there."""
        path = self.root / venv / "bin" / "python"
        if not path.exists():
            raise ServerError(f"there is no {venv}; see the targets test-vllm and test-sglang of the Makefile")
        return str(path)


@dataclass(frozen=True, slots=True)
class Reply:
    """What became of one request.

    Attributes:
        seconds: From sending the request to the first token of its answer.
        prompt_tokens: Tokens of the prompt.
        reused_tokens: Those that were not computed.
        first: The first token, as the engine writes it.
    """

    seconds: float
    prompt_tokens: int
    reused_tokens: int
    first: str


@dataclass(frozen=True, slots=True)
class Engine:
    """How an engine is started and asked.

    Attributes:
        name: In tables.
        venv: Environment that has it.
        packages: Whose versions are told.
        command: Arguments behind the interpreter, for a site, a variant and a port.
        environ: Variables of the server.
        path: Of the question.
        body: The question, for tokens; its answer of two tokens is streamed.
        reply: Prompt tokens, reused tokens and first token, by the events of an answer.
        has_reports: Whether they have kvgraft's report; where not, its metrics count.
    """

    name: str
    venv: str
    packages: tuple[str, ...]
    command: Callable[[Site, str, int], list[str]]
    environ: Callable[[Site, str], dict[str, str]]
    path: str
    body: Callable[[Sequence[int]], Json]
    reply: Callable[[Sequence[Json]], tuple[int, int, str]]
    has_reports: bool = True


class EngineServer(ProcessGroup):
    """One variant of an engine; a context manager that starts it and ends it.

    Attributes:
        url: Of its OpenAI-compatible API.
    """

    def __init__(self, engine: Engine, variant: str, site: Site, port: int) -> None:
        self._engine, self._port = engine, port
        self._is_counted = variant == "kvgraft" and not engine.has_reports
        self._counted_tokens = 0
        self.url = f"http://{HOST}:{port}"
        command = [site.python(engine.venv), *engine.command(site, variant, port)]
        super().__init__(command, f"{self.url}/health", engine.environ(site, variant))

    def __enter__(self) -> Self:
        require_free(self._port)
        return super().__enter__()

    def ask(self, token_ids: Sequence[int]) -> Reply:
        """Ask for two tokens and time the first; a repair would come before the only token of an answer of one."""
        reply = self._ask(self._engine.body(token_ids))
        return replace(reply, reused_tokens=self._newly_counted()) if self._is_counted else reply

    def _newly_counted(self) -> int:
        """Tokens that the metrics count as reused since the last call; a step tells those of the one before it."""
        self._ask(self._engine.body((3, 4, 5)) | {"kv_transfer_params": {"kvgraft": "off"}})
        time.sleep(METRICS_S)
        total = counted_tokens(self.url)
        found, self._counted_tokens = total - self._counted_tokens, total
        return found

    def _ask(self, body: Json) -> Reply:
        try:
            timed = timed_events(self._port, self._engine.path, body, _ANSWER_SECONDS)
        except ServerError as error:
            raise ServerError(f"{error}; the server said:\n{self.tail()}") from error
        return Reply(timed[0][0], *self._engine.reply([event for _, event in timed]))


def reused(report: Mapping[str, object]) -> int:
    """Prompt tokens that were not computed, by kvgraft's report."""
    return int(str(report["num_tokens"])) - int(str(report["computed_tokens"]))


def completion_body(token_ids: Sequence[int]) -> Json:
    """A greedy completion of two tokens."""
    sampling = {"max_tokens": 2, "temperature": 0, "ignore_eos": True}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    return {"model": MODEL_NAME, "prompt": list(token_ids), **sampling, **streamed}


def completion_reply(found: Sequence[Json]) -> tuple[int, int, str]:
    """Read a completion of `kvgraft serve` or vLLM."""
    usage = next(event["usage"] for event in reversed(found) if event.get("usage"))
    report = next((event["kvgraft"] for event in found if event.get("kvgraft")), None)
    cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    return int(usage["prompt_tokens"]), cached if report is None else reused(report), found[0]["choices"][0]["text"]


def generate_body(token_ids: Sequence[int]) -> Json:
    """Two tokens of SGLang's `/generate`, the one answer that has kvgraft's report."""
    sampling = {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}
    return {"input_ids": list(token_ids), "sampling_params": sampling, "stream": True}


def generate_reply(found: Sequence[Json]) -> tuple[int, int, str]:
    """Read an answer of SGLang."""
    facts = found[-1]["meta_info"]
    reports = facts.get("kvgraft") or ()
    count = sum(reused(entry["report"]) for entry in reports) if reports else int(facts["cached_tokens"])
    return int(facts["prompt_tokens"]), count, str(found[0]["output_ids"][0])


def _embedded(site: Site, variant: str, port: int) -> list[str]:
    modes = {"off": "off", "exact": "exact", "kvgraft": "graft"}
    values = {
        "--model": site.model,
        "--served-model-name": MODEL_NAME,
        "--host": HOST,
        "--port": port,
        "--dtype": "float32",
        "--max-model-len": site.max_tokens,
        "--kv-bytes": site.kv_tokens * (1 << 30) // _TOKENS_PER_GIB,
        "--reuse": modes[variant],
    }
    values |= {f"--{name.replace('_', '-')}": value for name, value in site.settings().items()}
    return ["-m", "kvgraft", "serve", *_words(values)]


def _vllm(site: Site, variant: str, port: int) -> list[str]:
    extra = {"kv_connector_extra_config": site.settings()} if site.settings() else {}
    transfer = {"kvgraft": CONNECTOR | extra, SEAM: IDLE_CONNECTOR}.get(variant)
    settings = ServerSettings(
        site.root / ".venv-vllm",
        site.model,
        port,
        transfer,
        dtype="float32",
        prefix_caching=variant != "off",
        max_model_tokens=site.max_tokens,
    )
    return settings.command()[1:]


def _sglang(site: Site, variant: str, port: int) -> list[str]:
    values = {
        "--model-path": site.model,
        "--served-model-name": MODEL_NAME,
        "--host": HOST,
        "--port": port,
        "--device": "cpu",
        "--attention-backend": "torch_native",
        "--grammar-backend": "none",
        "--dtype": "float32",
        "--mem-fraction-static": "0.8",  # of what is free now; the number of tokens is the bound
        "--watchdog-timeout": 3600,  # it would end a server that is held still
        "--max-running-requests": 16,
        "--chunked-prefill-size": site.max_tokens,
        "--context-length": site.max_tokens,
        "--max-total-tokens": site.kv_tokens,
    }
    flags = ["--disable-cuda-graph", "--skip-server-warmup", "--enable-cache-report", "--sleep-on-idle"]
    flags += {"off": ["--disable-radix-cache"], "exact": [], "kvgraft": ["--radix-cache-backend", "kvgraft"]}[variant]
    return ["-m", "sglang.launch_server", *_words(values), *flags]


def _sglang_environ(site: Site, variant: str) -> dict[str, str]:
    path = os.pathsep.join([*map(str, _SGLANG_STANDINS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": str(site.threads),
        "PYTHONPATH": path,
        "KVGRAFT_STATE_DIR": str(site.folder / f"sglang-{variant}"),
        **{f"KVGRAFT_{name.upper()}": value for name, value in site.settings().items()},
    }


def _vllm_environ(site: Site, _: str) -> dict[str, str]:
    gib = -(-site.kv_tokens // _TOKENS_PER_GIB)
    return {"VLLM_CPU_KVCACHE_SPACE": str(gib), "VLLM_CPU_OMP_THREADS_BIND": f"0-{site.threads - 1}"}


def _words(values: Mapping[str, object]) -> list[str]:
    return [str(part) for pair in values.items() for part in pair]


ENGINES = {
    engine.name: engine
    for engine in (
        Engine(
            "kvgraft serve",
            ".venv",
            ("kvgraft", "torch", "transformers"),
            _embedded,
            lambda site, _: {"OMP_NUM_THREADS": str(site.threads)},
            "/v1/completions",
            completion_body,
            completion_reply,
        ),
        Engine(
            "vLLM",
            ".venv-vllm",
            ("vllm-cpu", "kvgraft", "torch", "transformers"),
            _vllm,
            _vllm_environ,
            "/v1/completions",
            completion_body,
            completion_reply,
            has_reports=False,
        ),
        Engine(
            "SGLang",
            ".venv-sglang",
            ("sglang", "kvgraft", "torch", "transformers"),
            _sglang,
            _sglang_environ,
            "/generate",
            generate_body,
            generate_reply,
        ),
    )
}
