"""When the first tokens come of many requests about one document that arrive at once, by engine and by who knows it.

    python benchmarks/record.py one-text-vllm -- python benchmarks/engines/one_text.py --engine vllm

One server per run, with kvgraft and a store in a directory. In every round each kind gets a document of its own and as many
requests about it, each after a head and before a question of its own: `off` reuses nothing, `new` is asked with defaults
about text that nobody has computed, `known` about text that was read before, `stored` about text that a server before this
one has read: it lies in the store alone. Prints one JSON object with medians over rounds: seconds to the first token (median,
95th percentile) and until all are answered, the 95th percentile in times of the median, and by how much all come sooner than
with `off`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from burst_stalls import NAMES, first_token_s, server_of, words
from vllm_restart import wait_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from suite_servers import EngineServer
    from vllm_server import Json

KINDS = ("off", "new", "known", "stored")
_NUM_TOKENS = 4


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=tuple(NAMES), required=True)
    parser.add_argument("--model", type=Path, help="folder; default: graft-tiny")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--document-tokens", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--port", type=int, default=8_794)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[2], help="folder of the environments")
    args = parser.parse_args()
    rng = random.Random(0)
    stored = [words(rng, args.document_tokens) for _ in range(args.rounds + 1)]
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        with server_of(args, Path(folder), f"file:{store}") as server:
            for document in stored:
                server.ask(words(rng, 50) + document)
            wait_for(store, len(stored))
        with server_of(args, Path(folder), f"file:{store}") as server:
            for _ in range(3):  # a store is looked into beside the first requests
                server.ask(words(rng, 200))
                time.sleep(2.0)
            rows = measure(server, args, rng, stored)
    print(json.dumps({"engine": args.engine, "summary": summary(rows), "rows": rows}, indent=1))
    return 0


def measure(
    server: EngineServer, args: argparse.Namespace, rng: random.Random, stored: Sequence[Sequence[int]]
) -> list[Json]:
    """Return a row for each round and kind; the first round is not counted."""
    rows: list[Json] = []
    for number, in_store in enumerate(stored):
        for kind in rng.sample(KINDS, len(KINDS)):
            document = in_store if kind == "stored" else words(rng, args.document_tokens)
            if kind == "known":
                server.ask(words(rng, 50) + document)
            prompts = [words(rng, 50) + document + words(rng, 40) for _ in range(args.requests)]
            row = {"round": number, "kind": kind, **burst(args, prompts, kind)}
            print(json.dumps(row), file=sys.stderr, flush=True)
            rows += [row] if number else []
    return rows


def burst(args: argparse.Namespace, prompts: Sequence[Sequence[int]], kind: str) -> Json:
    """Ask all prompts at once."""
    side = "off" if kind == "off" else "kvgraft"
    started = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        first = list(pool.map(lambda prompt: first_token_s(args, prompt, side, _NUM_TOKENS), prompts))
    seconds = time.perf_counter() - started
    middle, late = np.percentile(first, [50, 95]).tolist()
    return {"first_p50_s": round(middle, 3), "first_p95_s": round(late, 3), "all_s": round(seconds, 3)}


def summary(rows: Sequence[Json]) -> Json:
    """Return medians over rounds by kind; ratios are of one round."""
    found: Json = {}
    by_round = {(row["round"], row["kind"]): row for row in rows}
    for kind in KINDS:
        mine = [row for row in rows if row["kind"] == kind]
        off = [by_round[row["round"], "off"] for row in mine]
        found[kind] = {
            **{name: statistics.median(row[name] for row in mine) for name in ("first_p50_s", "first_p95_s", "all_s")},
            "p95_times_p50": round(statistics.median(row["first_p95_s"] / row["first_p50_s"] for row in mine), 2),
            "sooner_than_off": round(
                statistics.median(other["all_s"] / row["all_s"] for other, row in zip(off, mine, strict=True)), 2
            ),
        }
    return found


if __name__ == "__main__":
    sys.exit(main())
