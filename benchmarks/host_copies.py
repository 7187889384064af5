"""Copy the K/V of a text to host memory that the process has not had before: two tensors per layer, or one piece of memory.

    .venv/bin/python benchmarks/host_copies.py --tokens 850

K/V have the shape of SmolLM2-135M in float32, in a cache of blocks as vLLM has it on a processor; texts are kept, as donors
are. Both ways in turns, with a rest after each, processor time of the one thread; rows for texts that have room, as on a
server that is young, and for those that take the place of the oldest. Medians, and a bootstrapped 95 % interval of their
ratio. JSON goes to standard output.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvgraft.integrations.vllm.codec.cpu import TransposedKeysCodec
from kvgraft.memory import KVBlock
from kvgraft.memory.packed import PackedLayout, RowShape

if TYPE_CHECKING:
    from numpy.typing import NDArray

LAYERS, HEADS, DIM, BLOCK = 30, 3, 64, 128
_CACHE_TOKENS = 12_800
_KEPT = 20
_REST_S = 0.15
_RESAMPLES = 4_000


class Cache:
    """The K/V of a request, in blocks that do not lie side by side."""

    def __init__(self, num_tokens: int, rng: np.random.Generator) -> None:
        count = _CACHE_TOKENS // BLOCK
        self._codec = TransposedKeysCodec()
        self._layers = [torch.randn(count, HEADS, BLOCK, 2 * DIM) for _ in range(LAYERS)]
        blocks, positions = rng.permutation(count), np.arange(num_tokens)
        self._slots = torch.from_numpy(blocks[positions // BLOCK] * BLOCK + positions % BLOCK)
        self._num_tokens = num_tokens

    def apart(self) -> KVBlock:
        """Copy two tensors per layer, as torch makes them."""
        pairs = [self._codec.read(layer, self._slots) for layer in self._layers]
        return KVBlock(tuple(keys for keys, _ in pairs), tuple(values for _, values in pairs))

    def packed(self) -> KVBlock:
        """Copy into one piece of memory."""
        rows = (RowShape((HEADS, DIM), torch.float32),) * LAYERS
        block = PackedLayout(rows, rows).empty(self._num_tokens)
        for layer, keys, values in zip(self._layers, block.keys, block.values, strict=True):
            found_keys, found_values = self._codec.read(layer, self._slots)
            keys.copy_(found_keys)
            values.copy_(found_values)
        return block


def figures(times: dict[str, NDArray[np.float64]], rng: np.random.Generator) -> dict[str, object]:
    """Return medians of both ways and the ratio of these."""
    apart, packed = times["apart"], times["packed"]
    drawn = rng.integers(len(apart), size=(_RESAMPLES, len(apart)))
    ratios = np.median(packed[drawn], axis=1) / np.median(apart[drawn], axis=1)
    return {
        "rounds": len(apart),
        "cpu_ms": {name: round(float(np.median(found)), 2) for name, found in times.items()},
        "ratio": round(float(np.median(packed) / np.median(apart)), 4),
        "ratio_ci": [round(float(bound), 4) for bound in np.percentile(ratios, (2.5, 97.5))],
        "cpu_ms_each": {name: [round(float(value), 2) for value in found] for name, found in times.items()},
    }


def main() -> int:
    """Measure both ways."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=850)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(args.seed)
    cache = Cache(args.tokens, rng)
    ways = {"apart": cache.apart, "packed": cache.packed}
    kept: dict[str, list[KVBlock]] = {name: [] for name in ways}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(args.rounds):
        for name in sorted(ways, reverse=bool(number % 2)):
            started = time.thread_time()
            kept[name].append(ways[name]())
            times[name].append(1e3 * (time.thread_time() - started))
            time.sleep(_REST_S)
            if len(kept[name]) >= _KEPT:
                del kept[name][0]
    result = {
        "tokens": args.tokens,
        "seed": args.seed,
        "num_bytes": cache.packed().num_bytes,
        "rows": [
            {"memory": name, **figures({way: np.array(found[part]) for way, found in times.items()}, rng)}
            for name, part in (("new", slice(1, _KEPT)), ("used before", slice(_KEPT, None)))
        ],
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
