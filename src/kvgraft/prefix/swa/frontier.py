"""Where the windows of a running sequence end: below it no row will ever read window K/V again."""

from __future__ import annotations


def swa_frontier(num_tokens: int, sliding_window_size: int, page_size: int) -> int:
    """Position below which a sequence of `num_tokens` needs no window KV any more, in whole pages.

    The margin of a whole page keeps the last leaf of an insert alive: with pages of 8, a window of 2 and 10 tokens,
    `floor(10 - 2)` would be the whole leaf `[0, 8)`.
    """
    window = max(sliding_window_size, page_size)
    window += -window % page_size
    frontier = max(num_tokens - window, 0)
    return frontier - frontier % page_size
