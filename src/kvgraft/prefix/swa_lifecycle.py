"""What a hybrid cache does with a request while it decodes, between chunks and at its end.

Of a row, `[protected_len, ...)` of the full-attention slots and `[max(protected_len, swa_evicted_len), ...)` of the
sliding-window slots are the request's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvgraft.errors import ConfigError
from kvgraft.prefix.base import NO_SLOTS, NOTHING_FREED, EvictResult
from kvgraft.prefix.swa_node import SWALock

if TYPE_CHECKING:
    from kvgraft.prefix.request import CacheRequest
    from kvgraft.prefix.swa import SWAInsertResult, SWARadixCache


def swa_frontier(num_tokens: int, sliding_window_size: int, page_size: int) -> int:
    """Position below which a sequence of `num_tokens` needs no window KV any more, in whole pages.

    The margin of a whole page keeps the last leaf of an insert alive: with pages of 8, a window of 2 and 10 tokens,
    `floor(10 - 2)` would be the whole leaf `[0, 8)`.
    """
    window = max(sliding_window_size, page_size)
    window += -window % page_size
    frontier = max(num_tokens - window, 0)
    return frontier - frontier % page_size


def advance_window(cache: SWARadixCache, req: CacheRequest) -> EvictResult:
    """Free the window slots that `req` has left behind: its own, and early the window of its lock.

    To be called at intervals during prefill and decode. The frontier only advances. Complexity: O(tokens freed).
    """
    _check_row(req)
    freed = []
    frontier = swa_frontier(len(req.key()), cache.sliding_window_size, cache.page_size)
    start = max(req.swa_evicted_len, req.protected_len)
    if frontier > start:
        freed.append(req.swa_indices[start:frontier].copy())
        req.swa_indices[start:frontier] = -1
        req.swa_evicted_len = frontier
    lock = req.handle
    past_prefix = req.committed_len - req.protected_len >= cache.sliding_window_size
    if past_prefix and isinstance(lock, SWALock) and not lock.swa_released:
        freed.append(cache.dec_swa_lock_only(lock).swa_freed)
        req.swa_indices[: req.protected_len] = -1
    return EvictResult(NO_SLOTS, np.concatenate([NO_SLOTS, *freed]))


def store_unfinished(cache: SWARadixCache, req: CacheRequest) -> EvictResult:
    """Store the computed part of `req`, which goes on with the cache's slots of both pools and a new lock."""
    _check_row(req)
    if req.skip_insert or cache.disabled:
        return NOTHING_FREED
    result = _insert(cache, req)
    start, stop = req.protected_len, result.total_len
    req.kv_indices[start:stop] = cache.path_slots(result.handle, start)
    req.swa_indices[start:stop] = cache.swa_path_slots(result.handle, start)
    lock = cache.lock_inserted(result.handle)
    late = NOTHING_FREED if req.handle is None else cache.dec_lock_ref(req.handle)
    req.handle = lock
    req.protected_len = req.num_inserted = stop
    return _together(result, late)


def store_finished(cache: SWARadixCache, req: CacheRequest, *, is_insert: bool) -> EvictResult:
    """Store the computed part of `req` and release it; returns duplicates and tails, or everything it owned."""
    _check_row(req)
    result, kept = NOTHING_FREED, req.protected_len
    if is_insert and not req.skip_insert and not cache.disabled:
        inserted = _insert(cache, req)
        cache.split_prompt(inserted.handle, req)
        result, kept = EvictResult(inserted.freed, inserted.swa_freed), inserted.total_len
    tails = EvictResult(req.kv_indices[kept:], req.swa_indices[max(kept, req.swa_evicted_len) :])
    late = NOTHING_FREED if req.handle is None else cache.dec_lock_ref(req.handle)
    freed = _together(result, tails, late)
    req.handle = None
    req.kv_indices = req.swa_indices = NO_SLOTS
    req.protected_len = req.swa_evicted_len = 0
    return freed


def _insert(cache: SWARadixCache, req: CacheRequest) -> SWAInsertResult:
    key = req.key()
    return cache.insert(
        key,
        req.kv_indices[: len(key)],
        after=req.handle,
        priority=req.priority,
        counted_len=req.num_inserted,
        swa_indices=req.swa_indices[: len(key)],
        prev_prefix_len=req.protected_len,
        swa_evicted_len=req.swa_evicted_len,
    )


def _check_row(req: CacheRequest) -> None:
    if len(req.swa_indices) != len(req.kv_indices):
        raise ConfigError(
            f"the row has {len(req.kv_indices)} full-attention and {len(req.swa_indices)} sliding-window slots; "
            "give both, with -1 where a window slot is gone"
        )


def _together(*results: EvictResult | SWAInsertResult) -> EvictResult:
    return EvictResult(
        np.concatenate([NO_SLOTS, *(result.freed for result in results)]),
        np.concatenate([NO_SLOTS, *(result.swa_freed for result in results)]),
    )
