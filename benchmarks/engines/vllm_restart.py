"""Time to first token of a vLLM server on a CPU that was killed and started again, with its donors in a directory.

    python benchmarks/engines/vllm_restart.py --venv .venv-vllm --model DIR --lengths 1000,4000 --runs 3

A first server reads documents and is killed with SIGKILL when they are in the directory. Its successor is asked for each of
them behind a head that it has not seen: `restarted`. The same question with another head comes next, when the document is in
host memory: `at hand`. `cold` is a document of the same length that nobody has read, asked in turn with these. Files were
written a moment before, so the operating system has them in memory. Prints JSON with medians.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from vllm_server import ServerSettings, VLLMServer
from vllm_ttft import CONNECTOR

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_server import Answer

VOCABULARY = 8192
_PORT = 18_941
_PATIENCE_S = 600.0
_HEAD_TOKENS, _QUESTION_TOKENS = 30, 20


class Server(Protocol):
    """What is measured."""

    def stream(self, token_ids: Sequence[int], **fields: object) -> Answer:
        """Answer a prompt."""
        ...


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=Path(".venv-vllm"), help="environment with vLLM and kvgraft")
    parser.add_argument("--model", type=Path, required=True, help="directory of the model")
    parser.add_argument("--lengths", default="1000,4000", help="document lengths in tokens")
    parser.add_argument("--runs", type=int, default=3, help="documents per length")
    args = parser.parse_args()
    lengths = [int(text) for text in args.lengths.split(",")]
    rng = random.Random(14)
    documents = {length: [words(rng, length) for _ in range(args.runs)] for length in lengths}
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        options = {"store": f"file:{store}", "lookup_deadline_ms": 1000}
        settings = ServerSettings(
            args.venv,
            args.model,
            _PORT,
            {**CONNECTOR, "kv_connector_extra_config": options},
            dtype="float32",
            environ={"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"},
        )
        with VLLMServer(settings) as first:
            for document in (document for group in documents.values() for document in group):
                first.stream(document)
            wait_for(store, len(lengths) * args.runs)
            num_bytes = sum(path.stat().st_size for path in store.glob("*/*.safetensors"))
            first.kill()
        with VLLMServer(settings) as second:
            for _ in range(3):  # weights are proved behind the first forward pass, then the directory is looked into
                second.stream(words(rng, 200))
                time.sleep(3)
            rows = [row for length in lengths for row in measure(second, documents[length], rng)]
    facts = {"model": args.model.name, "dtype": "float32", "runs": args.runs, "stored_bytes": num_bytes}
    print(json.dumps({**facts, "rows": rows}, indent=1))
    return 0


def measure(server: Server, documents: list[list[int]], rng: random.Random) -> list[dict[str, object]]:
    """Return one row per kind of prompt."""
    times: dict[str, list[float]] = {"cold": [], "restarted": [], "at hand": []}
    cached: dict[str, list[int]] = {kind: [] for kind in times}
    for document in documents:
        for kind, times_of_kind in times.items():
            text = words(rng, len(document)) if kind == "cold" else document
            answer = server.stream(words(rng, _HEAD_TOKENS) + text + words(rng, _QUESTION_TOKENS))
            times_of_kind.append(answer.seconds * 1e3)
            cached[kind].append(answer.cached_tokens)
            time.sleep(1)  # what was read comes into host memory behind the answer
    cold = statistics.median(times["cold"])
    return [
        {
            "tokens": len(documents[0]),
            "prompt": kind,
            "ttft_ms": round(statistics.median(values), 1),
            "min_ms": round(min(values), 1),
            "speedup": round(cold / statistics.median(values), 1),
            "cached_tokens": cached[kind],
        }
        for kind, values in times.items()
    ]


def words(rng: random.Random, count: int) -> list[int]:
    """Random text."""
    return [rng.randrange(3, VOCABULARY) for _ in range(count)]


def wait_for(store: Path, count: int) -> None:
    """Wait until so many documents are in the directory."""
    deadline = time.monotonic() + _PATIENCE_S
    while len(list(store.glob("*/*.safetensors"))) < count:
        if time.monotonic() > deadline:
            raise RuntimeError(f"not all of {count} documents were stored")
        time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main())
