"""Times the radix cache: match and insert by length, eviction by size of the tree. Prints microseconds.

    PYTHONPATH=src python benchmarks/bench_radix.py [--nodes 100000]

Timed are the calls a request makes, the construction of its key included. A median is over `REPEATS` calls.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.prefix import RadixCache, RadixKey, SlotArray

if TYPE_CHECKING:
    from collections.abc import Callable

REPEATS = 101
LENGTHS = (1_024, 8_192, 32_768, 131_072)
LEAF_TOKENS = 192
LEAVES_PER_PARENT = 99


def median_us(call: Callable[[int], object], repeats: int = 0) -> float:
    """Median time of `call(i)` for i = 0 .. repeats - 1; `REPEATS` calls by default."""
    times = []
    for i in range(repeats or REPEATS):
        start = time.perf_counter()
        call(i)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def random_tokens(rng: np.random.Generator, num_tokens: int) -> SlotArray:
    """Token ids of a vocabulary of 32,000."""
    return rng.integers(0, 32_000, num_tokens)


def bench_length(num_tokens: int) -> dict[str, float]:
    """One stored prompt of `num_tokens`."""
    rng = np.random.default_rng(0)
    token_ids = random_tokens(rng, num_tokens)
    slots = np.arange(num_tokens)
    cache = RadixCache()
    cache.insert(RadixKey(token_ids), slots)
    misses = [random_tokens(rng, num_tokens) for _ in range(REPEATS)]
    chain = RadixCache()
    for end in range(512, num_tokens + 1, 512):
        chain.insert(RadixKey(token_ids[:end]), slots[:end])

    for name, tree, tokens, expected in (
        ("one node", cache, token_ids, num_tokens),
        ("nodes of 512", chain, token_ids, num_tokens // 512 * 512),
        ("a miss", cache, misses[0], 0),
    ):
        found = tree.match_prefix(RadixKey(tokens)).prefix_len
        if found != expected:
            raise SystemExit(
                f"bench_radix: {name} matched {found} tokens instead of {expected}; its times mean nothing"
            )

    def insert_cold(_: int) -> None:
        RadixCache().insert(RadixKey(token_ids), slots)

    return {
        "match, one node": median_us(lambda _: cache.match_prefix(RadixKey(token_ids))),
        "match, nodes of 512": median_us(lambda _: chain.match_prefix(RadixKey(token_ids))),
        "miss": median_us(lambda i: cache.match_prefix(RadixKey(misses[i]))),
        "cold insert": median_us(insert_cold),
        "match that splits": _split_us(token_ids, slots),
    }


def _split_us(token_ids: SlotArray, slots: SlotArray) -> float:
    caches = [RadixCache() for _ in range(11)]
    for cache in caches:
        cache.insert(RadixKey(token_ids), slots)
    half = token_ids[: len(token_ids) // 2]
    return median_us(lambda i: caches[i].match_prefix(RadixKey(half)), len(caches))


def build_tree(num_nodes: int, page_size: int) -> tuple[RadixCache, list[SlotArray]]:
    """A tree of prompts that share parents: `LEAVES_PER_PARENT` leaves of `LEAF_TOKENS` below each."""
    rng = np.random.default_rng(1)
    cache = RadixCache(page_size)
    prompts = []
    for start in range(0, num_nodes, LEAVES_PER_PARENT + 1):
        parent = random_tokens(rng, 64)
        for leaf in range(LEAVES_PER_PARENT):
            first = np.arange(page_size) + leaf * page_size
            prompts.append(np.concatenate([parent, first, random_tokens(rng, LEAF_TOKENS - page_size)]))
            slots = np.arange(len(prompts[-1])) + (start + leaf) * 256
            cache.insert(RadixKey(prompts[-1]), slots)
    return cache, prompts


def bench_eviction(num_nodes: int, page_size: int) -> dict[str, float]:
    """Eviction of 64 tokens, in a fresh tree and when every leaf was touched in random order since."""
    cache, prompts = build_tree(num_nodes, page_size)
    fresh = median_us(lambda _: cache.evict(64))
    held = cache.evictable_size
    cache.evict(64)
    if cache.evictable_size > held - 64:
        raise SystemExit("bench_radix: an eviction of 64 tokens freed fewer; its times mean nothing")
    order = np.random.default_rng(2).permutation(len(prompts))
    match = median_us(lambda i: cache.match_prefix(RadixKey(prompts[order[i]])), len(order))
    start = time.perf_counter()
    cache.evict(64)
    first = (time.perf_counter() - start) * 1e6
    return {
        "match": match,
        "evict 64, fresh": fresh,
        "evict 64, first after touching all": first,
        "evict 64, after touching all": median_us(lambda _: cache.evict(64)),
    }


def main() -> None:
    """Run and print all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=100_000)
    num_nodes = parser.parse_args().nodes
    for num_tokens in LENGTHS:
        for name, microseconds in bench_length(num_tokens).items():
            print(f"{num_tokens:>7} tokens  {name:<36}{microseconds:>10.1f} us")
    for page_size in (1, 16):
        for name, microseconds in bench_eviction(num_nodes, page_size).items():
            print(f"{num_nodes:>7} nodes, page {page_size:<2}  {name:<36}{microseconds:>10.1f} us")


if __name__ == "__main__":
    main()
