"""Memory of a long chat on a hybrid model: full cache against full and window pools. Prints JSON. Cache level, no model.

    PYTHONPATH=src python benchmarks/prefix/bench_hybrid_memory.py [--turns 40] [--window 512] [--layers 26] [--full-layers 4]

One chat, turn by turn through `SWARadixCache`, the window advanced at every step of decode. KV is counted in
token-layers: a full-attention slot holds the full layers of a token, a window slot its window layers; a full cache holds
all layers of every token. Layer counts default to those of Gemma 3 1B (26 layers, 4 of them full, window 512).
"""

from __future__ import annotations

import argparse
import json

import numpy as np

from kvgraft.prefix import RequestRow, SWARadixCache
from kvgraft.testing.slots import CheckedSlots

PROMPT_TOKENS, OUTPUT_TOKENS = 200, 300
"""Of one turn."""


def chat(turns: int, window: int, page_size: int) -> dict[str, list[int]]:
    """Tokens held by each pool at the end of each turn, and at most within it."""
    rng = np.random.default_rng(0)
    cache = SWARadixCache(page_size, sliding_window_size=window, leaf_cap=True)
    total = turns * (PROMPT_TOKENS + OUTPUT_TOKENS)
    full, swa = CheckedSlots(2 * total), CheckedSlots(2 * total)
    history = np.empty(0, np.int64)
    held: dict[str, list[int]] = {"full": [], "swa": [], "swa_peak": []}
    for turn in range(turns):
        prompt = np.concatenate([history, rng.integers(0, 32_000, PROMPT_TOKENS)])
        tokens = np.concatenate([prompt, rng.integers(0, 32_000, OUTPUT_TOKENS)])
        req = RequestRow(str(turn), tokens, np.empty(0, np.int64), prompt_len=len(prompt))
        match = cache.match_prefix(req.key(len(prompt) - 1))
        assert turn == 0 or match.prefix_len >= len(history) // page_size * page_size - page_size
        req.adopt(match, cache.inc_lock_ref(match.handle))
        peak = 0
        for num in [len(prompt) - req.committed_len] + [1] * OUTPUT_TOKENS:
            slots, windows = full.alloc(num), swa.alloc(num)
            assert slots is not None
            assert windows is not None
            req.grow(slots, windows)
            swa.free(cache.advance_window(req).swa_freed)
            peak = max(peak, swa.size - swa.available)
        result = cache.cache_finished_req(req)
        full.free(result.freed)
        swa.free(result.swa_freed)
        excess = cache.swa_total_size - 2 * window  # a pool of two windows for one chat
        if excess > 0:
            swa.free(cache.evict(0, excess).swa_freed)
        history = tokens
        held["full"].append(full.size - full.available)
        held["swa"].append(swa.size - swa.available)
        held["swa_peak"].append(peak)
    return held


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--layers", type=int, default=26)
    parser.add_argument("--full-layers", type=int, default=4)
    args = parser.parse_args()
    held = chat(args.turns, args.window, args.page_size)
    window_layers = args.layers - args.full_layers
    rows = []
    for turn in sorted({0, args.turns // 4, args.turns // 2, args.turns - 1}):
        hybrid = held["full"][turn] * args.full_layers + held["swa"][turn] * window_layers
        uniform = held["full"][turn] * args.layers
        rows.append(
            {
                "turn": turn + 1,
                "tokens": held["full"][turn],
                "window_tokens": held["swa"][turn],
                "window_tokens_peak": held["swa_peak"][turn],
                "token_layers_full_cache": uniform,
                "token_layers_hybrid": hybrid,
                "share": round(hybrid / uniform, 3),
            }
        )
    settings = {
        "window": args.window,
        "page_size": args.page_size,
        "layers": args.layers,
        "full_layers": args.full_layers,
    }
    print(json.dumps({**settings, "chat": rows}, indent=1))


if __name__ == "__main__":
    main()
