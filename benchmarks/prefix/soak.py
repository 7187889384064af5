"""Random operations on the prefix caches beside their oracles, `check()` after each; prints rate and memory as it goes.

    python -m benchmarks.prefix.soak [--operations 1000000] [--seed N]

Ends with 1 at the first difference or broken invariant, or if memory grew by more than `--max-growth-mb` after the first
tenth. Prints one JSON object at the end.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from pathlib import Path

from tests.support.radix_walk import RadixModel
from tests.support.ssm_walk import random_walk as random_state_walk
from tests.support.swa_walk import random_walk

from kvgraft.prefix import EVICTION_POLICIES
from kvgraft.windows import ChunkedWindow, SlidingWindow

PAGES, WINDOWS, CHUNKS = (1, 2, 4, 16), (1, 2, 3, 5, 8, 16, 33, 64), (1, 2, 3, 8)
WALK = 1_000
"""Operations on one cache before the next one."""


def resident_mb() -> float:
    """Resident memory of this process."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def walk(index: int, seed: int) -> None:
    """One cache, with windows, plain and with states in turns, over pages, windows, chunks and policies."""
    kind, turn = index % 3, index // 3
    page_size = PAGES[turn % len(PAGES)]
    policies = sorted(EVICTION_POLICIES)
    policy = policies[turn // len(PAGES) % len(policies)]
    if kind == 0:
        window = WINDOWS[turn // len(PAGES) % len(WINDOWS)]
        window_kind = ChunkedWindow if turn // 64 % 2 else SlidingWindow
        random_walk(seed + index, WALK, page_size, window_kind(window), leaf_cap=bool(turn // 32 % 2))
    elif kind == 1:
        model = RadixModel(seed + index, page_size, policy)
        for _ in range(WALK):
            model.step()
    else:
        random_state_walk(seed + index, WALK, page_size, CHUNKS[turn // 32 % len(CHUNKS)], policy)


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=20261121)
    parser.add_argument("--max-growth-mb", type=float, default=16)
    args = parser.parse_args()
    num_walks = -(-args.operations // WALK)
    started, first_mb = time.perf_counter(), resident_mb()
    for index in range(num_walks):
        walk(index, args.seed)
        if index == num_walks // 10:
            first_mb = resident_mb()
        if index % 50 == 49:
            seconds = time.perf_counter() - started
            print(f"{(index + 1) * WALK} operations, {seconds:.0f} s, {resident_mb():.1f} MB", file=sys.stderr)
    growth = resident_mb() - first_mb
    seconds = time.perf_counter() - started
    result = {
        "seed": args.seed,
        "operations": num_walks * WALK,
        "violations": 0,
        "seconds": round(seconds),
        "memory_growth_mb": round(growth, 2),
    }
    print(json.dumps(result, indent=1))
    return int(growth > args.max_growth_mb)


if __name__ == "__main__":
    sys.exit(main())
