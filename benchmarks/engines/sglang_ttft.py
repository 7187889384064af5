"""Time to first token over HTTP of a stock SGLang server on a CPU, with and without `--radix-cache-backend kvgraft`.

    .venv-sglang/bin/python benchmarks/engines/sglang_ttft.py --lengths 1000,4000 --runs 5 [--beside BACKEND=FOLDER]

Per length and run: a cold document, the same prompt again, the document behind another head, and its three thirds in reverse
order with fresh text between. With `--beside` another package's radix-cache backend, whose entry point lies in a folder, is
measured in a third server. All servers run at the same time on the same machine and take turns, so that its noise hits
all alike. Prints JSON with medians; the model has 29 M random parameters, so the figures show plumbing, not a GPU's gain.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "integration" / "sglang"))

from models import write_model
from server import SHARED_STANDINS, STANDINS, SGLangServer

VOCABULARY = 8192
OPTIONS = {
    "--max-total-tokens": 40_000,
    "--context-length": 16_384,
    "--chunked-prefill-size": 16_384,
    "--disable-overlap-schedule": None,
}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="1000,4000", help="document lengths in tokens")
    parser.add_argument("--runs", type=int, default=5, help="documents per length")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--beside", default="", metavar="BACKEND=FOLDER", help="another backend, and where it is found")
    args = parser.parse_args()
    lengths = [int(text) for text in args.lengths.split(",")]
    options = {**OPTIONS, "--dtype": args.dtype}
    with tempfile.TemporaryDirectory() as folder:
        model = write_model("llama-29m", Path(folder))
        with ExitStack() as stack:
            made = {"stock": SGLangServer(model, options, backend=None), "kvgraft": SGLangServer(model, options)}
            if args.beside:
                made["beside"] = another_backend(model, options, args.beside)
            servers = {name: stack.enter_context(server) for name, server in made.items()}
            for server in servers.values():
                first_token_ms(server, list(range(3, 200)))
            rows = [row for length in lengths for row in measure(servers, length, args.runs)]
    print(
        json.dumps(
            {"dtype": args.dtype, "runs": args.runs, "model": "llama-29m, random weights", "rows": rows}, indent=1
        )
    )
    return 0


def another_backend(model: str, options: dict[str, object], beside: str) -> SGLangServer:
    """A server with the backend of another package, on the same stand-ins for what only a GPU has."""
    backend, _, folder = beside.partition("=")
    path = os.pathsep.join([str(STANDINS), str(SHARED_STANDINS), str(Path(folder).resolve())])
    return SGLangServer(model, options, {"PYTHONPATH": path}, backend)


def measure(servers: dict[str, SGLangServer], length: int, runs: int) -> list[dict[str, object]]:
    """Return one row per server and kind of prompt."""
    rng = random.Random(length)
    times: dict[tuple[str, str], list[float]] = {}
    cached: dict[tuple[str, str], int] = {}
    for _ in range(runs):
        prompts = make_prompts(rng, length)
        for kind, prompt in prompts.items():
            for name, server in servers.items():
                elapsed, cached[name, kind] = first_token_ms(server, prompt)
                times.setdefault((name, kind), []).append(elapsed)
    cold = statistics.median(times["stock", "cold"])
    return [
        {
            "tokens": length,
            "server": name,
            "prompt": kind,
            "ttft_ms": round(statistics.median(values), 1),
            "min_ms": round(min(values), 1),
            "speedup": round(cold / statistics.median(values), 1),
            "cached_tokens": cached[name, kind],
        }
        for (name, kind), values in times.items()
    ]


def make_prompts(rng: random.Random, length: int) -> dict[str, list[int]]:
    """Return the four prompts about one new document."""

    def ids(count: int) -> list[int]:
        return [rng.randrange(3, VOCABULARY) for _ in range(count)]

    document, third = ids(length), length // 3
    cold = ids(30) + document + ids(20)
    parts = (document[2 * third :], document[third : 2 * third], document[:third])
    return {
        "cold": cold,
        "exact": cold,
        "shifted": ids(47) + document + ids(20),
        "three reordered": ids(47) + parts[0] + ids(30) + parts[1] + ids(30) + parts[2] + ids(20),
    }


def first_token_ms(server: SGLangServer, prompt: list[int]) -> tuple[float, int]:
    """Send a prompt for one token; returns milliseconds and the tokens that were reused."""
    sampling = {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}
    started = time.perf_counter()
    answer = server.post("/generate", {"input_ids": prompt, "sampling_params": sampling})
    return 1e3 * (time.perf_counter() - started), answer["meta_info"]["cached_tokens"]


if __name__ == "__main__":
    sys.exit(main())
