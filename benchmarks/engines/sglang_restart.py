"""Time to first token of an SGLang server on a CPU that was killed and started again, with its donors in a directory.

    .venv-sglang/bin/python benchmarks/engines/sglang_restart.py --model DIR --lengths 1000,4000 --runs 3

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

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "integration" / "sglang"))

from models import write_model
from server import SGLangServer
from sglang_ttft import OPTIONS, first_token_ms

_PATIENCE_S = 600.0
VOCABULARY = 8192


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="", help="directory; a model of 29 M random parameters by default")
    parser.add_argument("--lengths", default="1000,4000", help="document lengths in tokens")
    parser.add_argument("--runs", type=int, default=3, help="documents per length")
    args = parser.parse_args()
    lengths = [int(text) for text in args.lengths.split(",")]
    rng = random.Random(14)
    documents = {length: [words(rng, length) for _ in range(args.runs)] for length in lengths}
    with tempfile.TemporaryDirectory() as folder:
        model, store = args.model or write_model("llama-29m", Path(folder)), Path(folder) / "store"
        environ = {"KVGRAFT_STORE": f"file:{store}"}
        options = {**OPTIONS, "--context-length": context_length(Path(model))}
        with SGLangServer(model, options, environ) as first:
            for document in (document for group in documents.values() for document in group):
                first_token_ms(first, document)
            wait_for(first, store, args.runs * len(lengths))
            num_bytes = sum(path.stat().st_size for path in store.glob("*/*.safetensors"))
            first.kill()
        with SGLangServer(model, options, environ) as second:
            second.settle()
            first_token_ms(second, words(rng, 200))
            rows = [row for length in lengths for row in measure(second, documents[length], rng)]
    name = Path(args.model).name if args.model else "llama-29m, random weights"
    facts = {"model": name, "dtype": "float32", "runs": args.runs, "stored_bytes": num_bytes}
    print(json.dumps({**facts, "rows": rows}, indent=1))
    return 0


def measure(server: SGLangServer, documents: list[list[int]], rng: random.Random) -> list[dict[str, object]]:
    """Return one row per kind of prompt."""
    times: dict[str, list[float]] = {"cold": [], "restarted": [], "at hand": []}
    cached: dict[str, int] = {}
    for document in documents:
        for kind, times_of_kind in times.items():
            text = words(rng, len(document)) if kind == "cold" else document
            elapsed, cached[kind] = first_token_ms(server, words(rng, 30) + text + words(rng, 20))
            times_of_kind.append(elapsed)
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


def context_length(model: Path) -> int:
    """Longest prompt that a model takes, and no longer than is asked for."""
    config = json.loads((model / "config.json").read_text())
    return min(16_384, int(config["max_position_embeddings"]))


def words(rng: random.Random, count: int) -> list[int]:
    """Random text."""
    return [rng.randrange(3, VOCABULARY) for _ in range(count)]


def wait_for(server: SGLangServer, store: Path, count: int) -> None:
    """Wait until so many documents are in the directory."""
    deadline = time.monotonic() + _PATIENCE_S
    while len(list(store.glob("*/*.safetensors"))) < count:
        if time.monotonic() > deadline:
            raise RuntimeError(f"not all of {count} documents were stored:\n{server.log()[-2000:]}")
        server.settle()


if __name__ == "__main__":
    sys.exit(main())
