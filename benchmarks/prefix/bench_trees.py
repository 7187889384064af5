"""Times prefix trees side by side: lookups and inserts by length, operations on large trees, memory per node. Prints JSON.

    PYTHONPATH=src python benchmarks/prefix/bench_trees.py [--nodes 10000,100000] [--pages 1,16] [--rounds 3] [--quick]

SGLang's trees take part where it is installed (`pip install --no-deps sglang==0.5.23` in an environment of its own with
torch and transformers). Times are medians in microseconds of calls that a request makes, building its key included. The
trees take turns, each figure is the median of its rounds, so that a slow moment of the machine is nobody's figure.
The process starts itself again with an allocator that keeps what is freed (`STEADY_MEMORY`), the same for every tree, and
one thread for torch, as SGLang sets in its own process beside a GPU (`OMP_NUM_THREADS` says otherwise).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from trees import available_trees

if TYPE_CHECKING:
    from collections.abc import Callable

    from trees import Tree

    Make = Callable[[], Tree]

LENGTHS = {"1K": 1024, "8K": 8192, "32K": 32_768, "128K": 131_072}
NODE_TOKENS = 512
KEY_TOKENS = 947
"""Mean prompt of chat-like traffic: a shared beginning, earlier turns, a new one."""
SEED = 20261121
STEADY_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(1 << 25)}
"""Keeps freed memory in the process, as a long-running one has it: page faults of the first touch are no tree's cost."""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Threads of torch unless the environment says otherwise. With more it copies what is longer than 32K with all of them."""


def median_us(call: Callable[[int], object], repeats: int) -> float:
    """Median time of `call(i)`, i = 0 .. repeats - 1, the garbage collector off."""
    times = []
    gc.collect()
    gc.disable()
    for index in range(repeats):
        started = time.perf_counter()
        call(index)
        times.append(time.perf_counter() - started)
    gc.enable()
    return round(statistics.median(times) * 1e6, 2)


def by_length(build: Callable[[], Tree], num_tokens: int, repeats: int) -> dict[str, float]:
    """One stored prompt: as one node, as a chain of 512-token nodes, split in its middle, missed, inserted anew."""
    rng = np.random.default_rng(SEED)
    token_ids, slots = rng.integers(0, 32_000, num_tokens), np.arange(num_tokens)
    one = build()
    tokens, native = one.prepare(token_ids, slots)
    one.insert(tokens, native)
    assert one.length_of(one.match(tokens)) == num_tokens
    chain = build()
    for end in range(NODE_TOKENS, num_tokens + 1, NODE_TOKENS):
        chain.insert(tokens[:end], native[:end])
    assert chain.length_of(chain.match(tokens)) == num_tokens
    misses = [one.prepare(np.roll(token_ids, index + 1))[0] for index in range(min(repeats, 20))]
    half = one.prepare(token_ids[: num_tokens // 2])[0]
    few = max(repeats // 5, 5)
    split = [build() for _ in range(few)]
    for tree in split:
        tree.insert(tokens, native)
    warm = [build() for _ in range(2 * few)]
    for tree in warm:  # memory that a long-running process has touched before
        tree.insert_copy(tokens, native)
    del warm, tree
    fresh = [build() for _ in range(few)]
    kept = one.hand_over(tokens)
    path = chain.match(tokens)
    return {
        "match, one node": median_us(lambda _: one.match(tokens), repeats),
        "match, one node, slots": median_us(lambda _: one.slots_of(one.match(tokens)), repeats),
        "match, nodes of 512": median_us(lambda _: chain.match(tokens), repeats),
        "match, nodes of 512, slots": median_us(lambda _: chain.slots_of(chain.match(tokens)), repeats),
        "miss": median_us(lambda index: one.match(misses[index % len(misses)]), repeats),
        "match that splits": median_us(lambda index: split[index].match(half), few),
        "cold insert": median_us(lambda index: fresh[index].insert_copy(tokens, native), few),
        "cold insert, tokens handed over": handed_over(build, (kept, native), few),
        "lock and unlock, nodes of 512": median_us(lambda _: chain.lock_and_unlock(path), repeats),
    }


def handed_over(build: Callable[[], Tree], prompt: tuple[object, object], repeats: int) -> float:
    """Median time to store a prompt whose tokens the tree may keep instead of copying them."""
    fresh = [build() for _ in range(repeats)]
    return median_us(lambda index: fresh[index].insert(*prompt), repeats)


def chunked(build: Callable[[], Tree], runs: int) -> float:
    """Milliseconds to insert 128K tokens in chunks of 512, locks moved along."""
    rng = np.random.default_rng(SEED)
    trees = [build() for _ in range(runs)]
    tokens, native = trees[0].prepare(rng.integers(0, 32_000, LENGTHS["128K"]), np.arange(LENGTHS["128K"]))
    return round(median_us(lambda index: trees[index].insert_chunks(tokens, native, NODE_TOKENS), runs) / 1e3, 2)


def prompts_for(num_nodes: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Chat-like prompts of 947 tokens: 40 shared beginnings of 755 tokens, tails of 192."""
    heads = [rng.integers(0, 32_000, KEY_TOKENS - 192) for _ in range(40)]
    return [np.concatenate([heads[index % 40], rng.integers(0, 32_000, 192)]) for index in range(num_nodes)]


def large(build: Callable[[], Tree], num_nodes: int, repeats: int) -> dict[str, float]:
    """A tree of `num_nodes` leaves: insert, match, evict little and much."""
    rng = np.random.default_rng(SEED)
    tree = build()
    prompts = prompts_for(num_nodes + repeats, rng)
    native = [tree.prepare(p, np.arange(len(p)) + 1000 * i) for i, p in enumerate(prompts)]
    del prompts
    for tokens, slots in native[:num_nodes]:
        tree.insert(tokens, slots)
    order = rng.permutation(num_nodes)
    few = max(repeats // 10, 5)
    return {
        "insert": median_us(lambda index: tree.insert(*native[num_nodes + index]), repeats),
        "match": median_us(lambda index: tree.match(native[order[index % num_nodes]][0]), repeats),
        "evict 64": median_us(lambda _: tree.evict(64), few),
        "evict 200000": median_us(lambda _: tree.evict(200_000), 3),
    }


def bytes_per_node(build: Callable[[], Tree], num_nodes: int) -> int:
    """Resident memory per leaf of 192 tokens; to be called once in a process of its own."""
    rng = np.random.default_rng(SEED)
    tree = build()
    prompts = prompts_for(num_nodes, rng)
    heads = [tree.prepare(p, np.arange(len(p))) for p in prompts[:40]]
    for tokens, slots in heads:  # imports and first allocations
        tree.insert(tokens, slots)
    gc.collect()
    before = resident_bytes()
    for index, prompt in enumerate(prompts[40:]):
        tree.insert(*tree.prepare(prompt, np.arange(len(prompt)) + 1000 * index))
    gc.collect()
    return round((resident_bytes() - before) / (num_nodes - 40))


def bytes_per_node_apart(name: str, page_size: int, num_nodes: int) -> int:
    """`bytes_per_node` in a new process."""
    command = [sys.executable, __file__, "--memory", f"{name},{page_size},{num_nodes}"]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def in_turn(makes: dict[str, Make], figures: Callable[[Make], Any], rounds: int) -> dict[str, Any]:
    """What `figures` says of each tree: medians over `rounds`, in each of which the trees take turns."""
    measured: dict[str, list[Any]] = {name: [] for name in makes}
    for _ in range(rounds):
        for name, make in makes.items():
            measured[name].append(figures(make))
    return {name: middle(runs) for name, runs in measured.items()}


def middle(runs: list[Any]) -> Any:  # noqa: ANN401 (a figure, or figures by name)
    """Median of figures that belong together."""
    if isinstance(runs[0], dict):
        return {key: middle([run[key] for run in runs]) for key in runs[0]}
    return round(statistics.median(runs), 2)


def measure(
    builds: dict[str, Callable[[int], Tree]], page_size: int, nodes: list[int], *, rounds: int, quick: bool
) -> dict[str, dict[str, Any]]:
    """All figures of all trees at one page size."""
    repeats = 30 if quick else 101
    makes: dict[str, Make] = {name: partial(build, page_size) for name, build in builds.items()}
    figures: dict[str, dict[str, Any]] = {}
    for label, num_tokens in LENGTHS.items():
        print(f"page {page_size}: {label}", file=sys.stderr)
        figures[label] = in_turn(makes, partial(by_length, num_tokens=num_tokens, repeats=repeats), rounds)
    figures["128K in chunks of 512, ms"] = in_turn(makes, partial(chunked, runs=3), rounds)
    for num_nodes in nodes:
        print(f"page {page_size}: {num_nodes} nodes", file=sys.stderr)
        figures[f"{num_nodes} nodes"] = in_turn(makes, partial(large, num_nodes=num_nodes, repeats=repeats), rounds)
    figures["bytes per node of 192 tokens"] = {name: bytes_per_node_apart(name, page_size, 20_000) for name in makes}
    return {name: {label: by_tree[name] for label, by_tree in figures.items()} for name in makes}


def installed(package: str) -> str:
    """Version of a package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def main() -> None:
    """Measure all trees and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", default="10000,100000")
    parser.add_argument("--pages", default="1,16")
    parser.add_argument("--trees", default="", help="names, comma-separated; default all that are there")
    parser.add_argument("--rounds", type=int, default=3, help="times that the trees take turns")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--memory", default="", metavar="TREE,PAGE,NODES", help="print bytes per node and end")
    args = parser.parse_args()
    if args.memory:
        name, page_size, num_nodes = args.memory.split(",")
        print(bytes_per_node(lambda: available_trees()[name](int(page_size)), int(num_nodes)))
        return
    pages, nodes = ([int(part) for part in text.split(",") if part] for text in (args.pages, args.nodes))
    trees = available_trees()
    names = args.trees.split(",") if args.trees else list(trees)
    chosen = {name: trees[name] for name in names}
    result: dict[str, dict[str, Any]] = {name: {} for name in names}
    for page_size in pages:
        for name, figures in measure(chosen, page_size, nodes, rounds=args.rounds, quick=args.quick).items():
            result[name][f"page {page_size}"] = figures
    versions = {package: installed(package) for package in ("numpy", "sglang", "torch")}
    threads = os.environ.get("OMP_NUM_THREADS", "all cores")
    print(json.dumps({"seed": SEED, "versions": versions, "torch threads": threads, "trees": result}, indent=1))


if __name__ == "__main__":
    settled = ONE_THREAD | os.environ | STEADY_MEMORY
    if settled != dict(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.argv], settled)
    main()
