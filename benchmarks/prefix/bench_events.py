"""What KV events add to a prefix cache: fill a tree, evict all of it step by step, with and without a log. Prints JSON.

    PYTHONPATH=src python benchmarks/prefix/bench_events.py [--nodes 1024,8192] [--tokens 128]

Two shapes of one size: `wide`, prompts that share nothing, and `deep`, one prompt in chunks, a node for each. Seconds are
the best of three runs. `log / bare` says what a log costs; `per node` must not grow with the tree.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np

from kvgraft.events import EventLog
from kvgraft.prefix import RadixCache, RadixKey

REPEATS = 3


def fill_wide(cache: RadixCache, tokens: np.ndarray) -> None:
    """Prompts that share nothing."""
    for first, prompt in enumerate(tokens):
        cache.insert(RadixKey(prompt), prompt + first)


def fill_deep(cache: RadixCache, tokens: np.ndarray) -> None:
    """Chunks of one prompt, each behind the one before."""
    prompt, handle = tokens.reshape(-1), None
    for end in range(tokens.shape[1], prompt.size + 1, tokens.shape[1]):
        handle = cache.insert(RadixKey(prompt[:end]), prompt[:end], after=handle).handle


SHAPES = {"wide": fill_wide, "deep": fill_deep}


def measure(shape: str, num_nodes: int, num_tokens: int, *, log: EventLog | None) -> dict[str, float]:
    """Seconds to fill a tree and to evict it node by node; events are fetched at the end of each."""
    cache = RadixCache(1, events=log)
    tokens = np.arange(num_nodes * num_tokens).reshape(num_nodes, num_tokens)
    started = time.perf_counter()
    SHAPES[shape](cache, tokens)
    if log is not None:
        log.take()
    filled = time.perf_counter()
    while cache.total_size:
        cache.evict(num_tokens)
    if log is not None:
        log.take()
    return {"fill": filled - started, "evict": time.perf_counter() - filled}


def compare(shape: str, num_nodes: int, num_tokens: int) -> dict[str, object]:
    """Both sides of one shape and size."""
    bare = [measure(shape, num_nodes, num_tokens, log=None) for _ in range(REPEATS)]
    logged = [measure(shape, num_nodes, num_tokens, log=EventLog()) for _ in range(REPEATS)]
    result: dict[str, object] = {"shape": shape, "nodes": num_nodes, "tokens per node": num_tokens}
    for step in ("fill", "evict"):
        without, with_log = (min(run[step] for run in runs) for runs in (bare, logged))
        result[step] = {
            "bare_s": round(without, 4),
            "log_s": round(with_log, 4),
            "log / bare": round(with_log / without, 1),
            "log, us per node": round(with_log / num_nodes * 1e6, 1),
        }
    return result


def main() -> None:
    """Measure all shapes and sizes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", default="1024,8192")
    parser.add_argument("--tokens", type=int, default=128, help="tokens per node")
    args = parser.parse_args()
    sizes = [int(part) for part in args.nodes.split(",")]
    print(json.dumps([compare(shape, size, args.tokens) for size in sizes for shape in SHAPES], indent=1))


if __name__ == "__main__":
    main()
