"""The life of a request in a prefix cache, the same for all of them: store, hand back, move the lock, let go.

    begin       match, lock, `RequestRow.adopt`
    store       between chunks, at preemption: what was computed goes into the cache, the row goes on with the cache's slots
    finish      the last of it goes into the cache; lock, duplicates and tail are given back

        [0, protected)        the cache's own, untouched
        [protected, prefix)   was stored meanwhile: the request's duplicates are returned
        [prefix, total)       taken by the cache
        [total, ...)          fills no page: stays the request's own, and is returned at the end

What differs between trees is how a row is stored (`RowStore`); the owner of the slots frees what is returned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvgraft.prefix.results import NO_SLOTS, NOTHING_FREED, EvictResult, PrefixHandle, join_results

if TYPE_CHECKING:
    from kvgraft.prefix.request import RequestRow


@dataclass(frozen=True, slots=True, eq=False)
class StoredRow:
    """The stored part of a row after an insert."""

    handle: PrefixHandle
    total_len: int
    """Positions of the row that are in the cache now."""
    duplicates: EvictResult
    """The request's own slots of positions that others had stored before; for the caller to free."""


class RowStore(Protocol):
    """The part of a tree that the lifecycle uses; `PrefixCache` has it for trees of one pool."""

    @property
    def disabled(self) -> bool:
        """Whether nothing is ever stored."""

    def store_row(self, req: RequestRow) -> StoredRow:
        """Insert what the request has computed, after the prefix that it has locked."""

    def point_row(self, req: RequestRow, stored: StoredRow) -> None:
        """Let the row name the cache's slots where the cache holds its positions now."""

    def lock_inserted(self, handle: PrefixHandle) -> PrefixHandle:
        """Lock what was stored; returns the receipt."""

    def end_prompt(self, stored: StoredRow, req: RequestRow) -> None:
        """Hear that the request has ended."""

    def dec_lock_ref(self, handle: PrefixHandle) -> EvictResult:
        """Give back a lock; returns slots that only it kept."""


def store_unfinished(cache: RowStore, req: RequestRow) -> EvictResult:
    """Store the computed part of `req`, which goes on with the cache's slots and a lock on all that is stored.

    Complexity: O(tokens after `protected_len`), independent of the length of the prefix.
    """
    if req.skip_insert or cache.disabled:
        return NOTHING_FREED
    stored = cache.store_row(req)
    cache.point_row(req, stored)
    lock = cache.lock_inserted(stored.handle)
    late = _unlock(cache, req)
    req.handle = lock
    req.protected_len = req.num_inserted = stored.total_len
    return join_results(stored.duplicates, late)


def store_finished(cache: RowStore, req: RequestRow, *, is_insert: bool) -> EvictResult:
    """Store the computed part of `req` and release it; returns duplicates and tail, or everything it owned."""
    duplicates, kept_len = NOTHING_FREED, req.protected_len
    if is_insert and not req.skip_insert and not cache.disabled:
        stored = cache.store_row(req)
        cache.end_prompt(stored, req)
        duplicates, kept_len = stored.duplicates, stored.total_len
    tail, states = req.own_slots(kept_len), EvictResult(NO_SLOTS, state_freed=req.leave_states())
    late = _unlock(cache, req)
    req.let_go()
    return join_results(duplicates, tail, states, late)


def _unlock(cache: RowStore, req: RequestRow) -> EvictResult:
    return NOTHING_FREED if req.handle is None else cache.dec_lock_ref(req.handle)
