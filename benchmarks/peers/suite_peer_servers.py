"""What suite_peers.py compares: how each peer is started, and how it is asked for two tokens with and without its reuse.

An answer of one token would wait for kvgraft's repair, which comes after the first token of longer ones.

Every peer keeps its documented defaults but for what would hide it: in vLLM its own prefix cache is off, so that every cached
token is the connector's; llama.cpp has one slot and no cache of prompts in host memory (`llama_cpp_server.py`).
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))

from vllm_server import (
    HOST,
    METRICS_S,
    MODEL_NAME,
    NUM_LOGPROBS,
    Answer,
    Json,
    ProcessGroup,
    ServerSettings,
    counted_tokens,
    timed_events,
)
from vllm_ttft import CONNECTOR

from kvgraft.models import smollm2_path

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

_ROOT = Path(__file__).parents[2]
_HERE = Path(__file__).parent
GGUF_NAME = "layers.gguf"
"""As make_smollm2.py calls it, which imports torch."""

_LMCACHE_CHUNK_TOKENS = 128
_BLOCK_SIZE = 128
_MAX_TOKENS = 4096
_ANSWER_SECONDS = 600.0
_ANSWER_TOKENS = 2
_ANY = (3, 4, 5)
"""A prompt whose answer nobody reads."""
_PACKAGES = ".venv-peers-suite"


@dataclass(frozen=True, slots=True)
class Site:
    """Where a peer runs.

    Attributes:
        model: Folder of the model, with `layers.gguf` beside it if it is not the whole one.
        port: The first of three that are free.
        threads: That it computes on.
        folder: For what it leaves behind.
    """

    model: Path
    port: int
    threads: int
    folder: Path


@dataclass(frozen=True, slots=True)
class Peer:
    """One way to reuse K/V.

    Attributes:
        name: In tables.
        needs: Folders under the root of the repository without which it cannot run.
        server: Makes its server for a site.
        ask: Asks it at a port for two tokens behind some tokens, and times the first; True without reuse.
        companion: Makes a server that it needs besides.
    """

    name: str
    needs: tuple[str, ...]
    server: Callable[[Site], ProcessGroup]
    ask: Callable[[int, Sequence[int], bool], Answer]
    companion: Callable[[Site], AbstractContextManager[object]] = lambda _: contextlib.nullcontext()


def ask_openai(port: int, token_ids: Sequence[int], **fields: object) -> Answer:
    """Ask for a completion; reused tokens are those of kvgraft's report, else of the usage."""
    body = {"model": MODEL_NAME, "prompt": list(token_ids), "max_tokens": _ANSWER_TOKENS, "temperature": 0}
    body |= {"ignore_eos": True, "logprobs": NUM_LOGPROBS, "stream": True, "stream_options": {"include_usage": True}}
    found = timed_events(port, "/v1/completions", body | fields, _ANSWER_SECONDS)
    seconds, first = next((at, event) for at, event in found if event["choices"])
    usage = next(event["usage"] for _, event in reversed(found) if event.get("usage"))
    report = next((event["kvgraft"] for _, event in found if event.get("kvgraft")), None)
    cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    if report is not None:
        cached = int(report["num_tokens"]) - int(report["computed_tokens"])
    return Answer(seconds, usage["prompt_tokens"], cached, first["choices"][0]["logprobs"]["top_logprobs"][0], report)


def ask_kvgraft(port: int, token_ids: Sequence[int], cold: bool) -> Answer:
    """Ask `kvgraft serve`."""
    return ask_openai(port, token_ids, **({"kvgraft": {"reuse": "off"}} if cold else {}))


def ask_vllm(port: int, token_ids: Sequence[int], cold: bool) -> Answer:
    """Ask vLLM; a salt of its own hides from a prompt what any connector keeps."""
    off = {"kv_transfer_params": {"kvgraft": "off"}, "cache_salt": f"cold {random.random()}"}
    return ask_openai(port, token_ids, return_tokens_as_token_ids=True, **(off if cold else {}))


def ask_grafting_vllm(port: int, token_ids: Sequence[int], cold: bool) -> Answer:
    """Ask vLLM with our connector, whose metrics count.

    Streams have no report, and the usage counts what the connector computes as cached.
    """
    url = f"http://{HOST}:{port}"
    before = counted_tokens(url)
    answer = ask_vllm(port, token_ids, cold)
    ask_vllm(port, _ANY, True)  # a step tells the counts of the one before it
    time.sleep(METRICS_S)
    return replace(answer, cached_tokens=counted_tokens(url) - before)


def ask_kvboost(port: int, token_ids: Sequence[int], cold: bool) -> Answer:
    """Ask `kvboost_worker.py`, which takes the time itself."""
    body = {"token_ids": list(token_ids), "cold": cold, "max_tokens": _ANSWER_TOKENS}
    ((_, answer),) = timed_events(port, "/", body, _ANSWER_SECONDS)
    return Answer(answer["seconds"], answer["prompt_tokens"], answer["cached_tokens"], answer["logprobs"])


def ask_llama_cpp(port: int, token_ids: Sequence[int], cold: bool) -> Answer:
    """Ask llama.cpp's server."""
    body = {
        "prompt": list(token_ids),
        "n_predict": _ANSWER_TOKENS,
        "temperature": 0,
        "n_probs": NUM_LOGPROBS,
        "cache_prompt": not cold,
        "ignore_eos": True,
        "stream": True,
    }
    found = timed_events(port, "/completion", body, _ANSWER_SECONDS)
    seconds, first = found[0]
    likeliest = first["completion_probabilities"][0]["top_logprobs"]
    logprobs = {str(entry["id"]): float(entry["logprob"]) for entry in likeliest}
    last = found[-1][1]
    return Answer(seconds, last["tokens_evaluated"], last["timings"]["cache_n"], logprobs)


def _serve(site: Site) -> ProcessGroup:
    values = {"--model": site.model, "--served-model-name": MODEL_NAME, "--host": HOST, "--port": site.port}
    values |= {"--dtype": "float32", "--kv-bytes": "1GiB"}
    command = [_python(".venv"), "-m", "kvgraft", "serve", *_words(values)]
    return ProcessGroup(command, f"http://{HOST}:{site.port}/health", {"OMP_NUM_THREADS": str(site.threads)})


def _vllm(site: Site, kv_transfer: Json, paths: Sequence[Path] = ()) -> ProcessGroup:
    path = os.pathsep.join([*map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = ServerSettings(
        _ROOT / ".venv-vllm",
        site.model,
        site.port,
        kv_transfer,
        dtype="float32",
        block_size=_BLOCK_SIZE,
        prefix_caching=False,
        environ={"PYTHONPATH": path, "VLLM_CPU_OMP_THREADS_BIND": f"0-{site.threads - 1}"},
        max_model_tokens=_MAX_TOKENS,
    )
    return ProcessGroup(settings.command(), f"http://{HOST}:{site.port}/health", settings.variables())


def _lmcache_server(site: Site) -> ProcessGroup:
    values = {
        "--host": HOST,
        "--port": site.port + 1,
        "--http-port": site.port + 2,
        "--chunk-size": _LMCACHE_CHUNK_TOKENS,
        "--l1-size-gb": 1,
        "--eviction-policy": "LRU",
        "--supported-transfer-mode": "auto",  # without it the engine waits for minutes on a CPU
    }
    command = [_python(".venv-vllm"), "-m", "lmcache.cli.main", "server", *_words(values), "--disable-metrics"]
    environ = {"PYTHONPATH": str(_ROOT / ".venv-vllm/lmcache"), "LMCACHE_TRACK_USAGE": "false"}
    return ProcessGroup(command, f"http://{HOST}:{site.port + 2}/healthcheck", environ)


def _lmcache(site: Site) -> ProcessGroup:
    extra = {"lmcache.mp.host": f"tcp://{HOST}", "lmcache.mp.port": site.port + 1}
    kv_transfer = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return _vllm(site, kv_transfer, [_ROOT / ".venv-vllm/lmcache"])


def _semblend(site: Site) -> ProcessGroup:
    extra = {
        "mode": "semantic_span_experimental",
        "provider_module": "exact_runs",
        "provider_class": "ExactRunsProvider",
        "max_materialized_tokens": _MAX_TOKENS,
        "kv_storage_backend": "memory",
        "kv_storage_path": str(site.folder / "kv"),
        "audit_path": str(site.folder / "audit.jsonl"),
        "log_decisions": False,
    }
    kv_transfer = {
        "kv_connector": "SemBlendVllmConnector",
        "kv_connector_module_path": "semblend_vllm_connector.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    return _vllm(site, kv_transfer, [_HERE, _ROOT / _PACKAGES / "semblend-vllm-connector"])


def _kvboost(site: Site) -> ProcessGroup:
    values = {"--model": site.model, "--port": site.port}
    command = [_python(".venv"), str(_HERE / "kvboost_worker.py"), *_words(values)]
    environ = {"PYTHONPATH": str(_ROOT / _PACKAGES / "kvboost"), "OMP_NUM_THREADS": str(site.threads)}
    return ProcessGroup(command, f"http://{HOST}:{site.port}/", environ)


def _llama_cpp(site: Site) -> ProcessGroup:
    cut = site.model / GGUF_NAME
    model = cut if cut.exists() else smollm2_path()
    values = {"--model": model, "--port": site.port, "--threads": site.threads}
    command = [_python(".venv"), str(_HERE / "llama_cpp_server.py"), *_words(values)]
    environ = {"PYTHONPATH": str(_ROOT / _PACKAGES / "xllamacpp")}
    return ProcessGroup(command, f"http://{HOST}:{site.port}/health", environ)


def _python(venv: str) -> str:
    return str(_ROOT / venv / "bin" / "python")


def _words(values: Json) -> list[str]:
    return [str(part) for pair in values.items() for part in pair]


PEERS = {
    peer.name: peer
    for peer in (
        Peer("kvgraft", (".venv",), _serve, ask_kvgraft),
        Peer("kvgraft in vLLM", (".venv-vllm",), lambda site: _vllm(site, CONNECTOR), ask_grafting_vllm),
        Peer("LMCache", (".venv-vllm/lmcache",), _lmcache, ask_vllm, _lmcache_server),
        Peer("semblend-vllm-connector", (f"{_PACKAGES}/semblend-vllm-connector",), _semblend, ask_vllm),
        Peer("kvboost", (f"{_PACKAGES}/kvboost",), _kvboost, ask_kvboost),
        Peer("llama.cpp", (f"{_PACKAGES}/xllamacpp",), _llama_cpp, ask_llama_cpp),
    )
}


def missing(peer: Peer) -> str:
    """What a peer lacks, in a line; empty if it has all it needs."""
    lacking = [need for need in peer.needs if not (_ROOT / need).exists()]
    remedy = "run benchmarks/peers/make_suite.sh and make .venv-vllm/.lmcache"
    return f"there is no {', '.join(lacking)}; {remedy}" if lacking else ""
