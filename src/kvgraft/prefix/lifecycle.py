"""What a plain cache does with a request between chunks and at its end: store, hand back, move the lock."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvgraft.prefix.base import NOTHING_FREED, EvictResult, InsertResult, SlotArray

if TYPE_CHECKING:
    from typing import Any

    from kvgraft.prefix.radix import BaseRadixCache
    from kvgraft.prefix.request import CacheRequest


def store_unfinished(cache: BaseRadixCache[Any], req: CacheRequest) -> EvictResult:
    """Store the computed part of `req`; it goes on with the cache's slots and a lock on all that is stored.

        [0, protected)        cache's own, untouched
        [protected, prefix)   was stored meanwhile: the request's duplicates are returned, its row is repointed
        [prefix, total)       taken by the cache
        [total, ...)          fills no page: stays the request's own

    Complexity: O(tokens behind `protected_len`), whatever the length of the prefix.
    """
    if req.skip_insert or cache.disabled:
        return NOTHING_FREED
    result = _insert(cache, req)
    start = req.protected_len
    duplicates = req.kv_indices[start : result.prefix_len].copy()
    stored = cache.path_slots(result.handle, start)
    req.kv_indices[start : result.total_len] = stored
    _move_lock(cache, req, result)
    return EvictResult(duplicates)


def store_finished(cache: BaseRadixCache[Any], req: CacheRequest, *, is_insert: bool) -> EvictResult:
    """Store the computed part of `req` and release it; returns duplicates and tail, or everything it owned."""
    freed: list[SlotArray] = []
    if is_insert and not req.skip_insert and not cache.disabled:
        result = _insert(cache, req)
        cache.split_prompt(result.handle, req)
        freed.append(req.kv_indices[req.protected_len : result.prefix_len])
        freed.append(req.kv_indices[result.total_len :])
    else:
        freed.append(req.kv_indices[req.protected_len :])
    slots = np.concatenate(freed)
    if req.handle is not None:
        cache.dec_lock_ref(req.handle)
    req.handle = None
    req.kv_indices = req.kv_indices[:0]
    req.protected_len = 0
    return EvictResult(slots)


def _insert(cache: BaseRadixCache[Any], req: CacheRequest) -> InsertResult:
    key = req.key()
    return cache.insert(
        key,
        req.kv_indices[: len(key)],
        after=req.handle if req.protected_len else None,
        priority=req.priority,
        counted_len=req.num_inserted,
    )


def _move_lock(cache: BaseRadixCache[Any], req: CacheRequest, result: InsertResult) -> None:
    lock = cache.inc_lock_ref(result.handle)
    if req.handle is not None:
        cache.dec_lock_ref(req.handle)
    req.handle = lock
    req.protected_len = req.num_inserted = result.total_len
