"""Streaming sessions: turns of one client that append to each other keep their KV between turns, whole, page tail included.

Between two turns the session holds the row and the lock that the last request had; the next turn continues it without
a lookup. What a session holds is in no other hands: `session_held_tokens` is part of the owner's balance
`available + evictable + protected + session_held + held by requests == total`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.errors import ConfigError
from kvgraft.prefix.base import (
    NO_SLOTS,
    NOTHING_FREED,
    EvictResult,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
    PrefixCache,
    PrefixHandle,
    SlotArray,
)
from kvgraft.prefix.key import RadixKey, common_prefix_len
from kvgraft.prefix.request import CacheRequest

if TYPE_CHECKING:
    from kvgraft.prefix.key import KeyNamespace
    from kvgraft.types import TokenArray


class SessionHandle(PrefixHandle):
    """A session's row as a match; its locks do nothing, because the session itself holds the lock below."""

    __slots__ = ("session_id",)

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id


@dataclass(slots=True, eq=False)
class _Session:
    """What a session keeps between turns, and who uses it now."""

    token_ids: TokenArray
    namespace: KeyNamespace
    kv_indices: SlotArray
    swa_indices: SlotArray
    swa_evicted_len: int
    lock: PrefixHandle | None
    protected_len: int
    in_use: bool = False
    closing: bool = False


class StreamingSession(PrefixCache):
    """Wraps a cache and adds sessions; requests without `session_id` pass through. Not thread-safe.

    Turns of a session run one after another. A turn whose prompt departs from what the session holds frees the
    departing tail first. A session holds its KV until it is closed, or until a turn is aborted after it has started.
    """

    def __init__(self, inner: PrefixCache) -> None:
        self.inner = inner
        self._sessions: dict[str, _Session] = {}

    @property
    def page_size(self) -> int:
        """Tokens per page of the wrapped cache."""
        return self.inner.page_size

    @property
    def evictable_size(self) -> int:
        """As the wrapped cache."""
        return self.inner.evictable_size

    @property
    def protected_size(self) -> int:
        """As the wrapped cache."""
        return self.inner.protected_size

    @property
    def disabled(self) -> bool:
        """As the wrapped cache."""
        return self.inner.disabled

    @property
    def session_held_tokens(self) -> int:
        """Slots that idle sessions own besides what the cache owns."""
        return sum(len(s.kv_indices) - s.protected_len for s in self._sessions.values() if not s.in_use)

    @property
    def session_held_swa_tokens(self) -> int:
        """Sliding-window slots that idle sessions own."""
        idle = [s for s in self._sessions.values() if not s.in_use and len(s.swa_indices)]
        return sum(len(s.swa_indices) - max(s.protected_len, s.swa_evicted_len) for s in idle)

    def supports_streaming_session(self) -> bool:
        """Whether sessions are kept: yes."""
        return True

    def match_prefix(self, params: MatchPrefixParams | RadixKey) -> MatchResult:
        """Match a session's row for its next turn, anything else in the wrapped cache.

        Slots of a departing tail are not freed by a lookup: `begin_turn` does that.
        """
        session_id = self._session_id(params)
        session = None if session_id is None else self._sessions.get(session_id)
        if session_id is None or session is None or session.in_use or isinstance(params, RadixKey):
            return self.inner.match_prefix(params)
        length = self._shared_len(session, params.key)
        if length < session.protected_len:
            return self.inner.match_prefix(params)
        return MatchResult([session.kv_indices[:length].copy()], length, SessionHandle(session_id))

    def begin_turn(self, req: CacheRequest) -> EvictResult:
        """Let `req` start from its session or, without one, from a match in the wrapped cache.

        Locks what it starts from, sets the row, and returns what the session held behind the point of departure.

        Raises:
            ConfigError: Another turn of the session is running.
        """
        session = None if req.session_id is None else self._sessions.get(req.session_id)
        if session is None:
            return self._begin_fresh(req)
        if session.in_use:
            raise ConfigError(f"session {req.session_id!r} has a turn running; finish or abort it first")
        length = self._shared_len(session, req.key(max(len(req.token_ids) - 1, 0)))
        if length < session.protected_len:
            freed = self.close_session(req.session_id or "")
            return _together(freed, self._begin_fresh(req))
        return self._continue(session, req, length)

    def _begin_fresh(self, req: CacheRequest) -> EvictResult:
        match = self.inner.match_prefix(MatchPrefixParams(req.key(max(len(req.token_ids) - 1, 0)), req))
        req.adopt(match, self.inner.inc_lock_ref(match.handle))
        return NOTHING_FREED

    def _continue(self, session: _Session, req: CacheRequest, length: int) -> EvictResult:
        own_swa = max(length, session.swa_evicted_len)
        freed = EvictResult(session.kv_indices[length:].copy(), session.swa_indices[own_swa:].copy())
        req.kv_indices = session.kv_indices[:length].copy()
        req.swa_indices = session.swa_indices[:length].copy()
        req.swa_evicted_len = min(session.swa_evicted_len, length)
        req.handle, req.protected_len = session.lock, session.protected_len
        req.num_inserted = session.protected_len
        session.in_use = True
        return freed

    def insert(
        self,
        key: RadixKey,
        kv_indices: SlotArray | None = None,
        *,
        after: PrefixHandle | None = None,
        priority: int = 0,
    ) -> InsertResult:
        """As the wrapped cache."""
        return self.inner.insert(key, kv_indices, after=after, priority=priority)

    def evict(self, num_tokens: int) -> EvictResult:
        """As the wrapped cache; what sessions hold stays."""
        return self.inner.evict(num_tokens)

    def inc_lock_ref(self, handle: PrefixHandle) -> PrefixHandle:
        """As the wrapped cache; a session's handle needs no lock."""
        return handle if isinstance(handle, SessionHandle) else self.inner.inc_lock_ref(handle)

    def dec_lock_ref(self, handle: PrefixHandle) -> EvictResult:
        """As the wrapped cache; a session's handle holds no lock."""
        return NOTHING_FREED if isinstance(handle, SessionHandle) else self.inner.dec_lock_ref(handle)

    def cache_unfinished_req(self, req: CacheRequest) -> EvictResult:
        """As the wrapped cache: chunks of a turn are shared like any others."""
        return self.inner.cache_unfinished_req(req)

    def cache_finished_req(self, req: CacheRequest, *, is_insert: bool = True) -> EvictResult:
        """Keep row and lock of a turn for the next one; an abort (`is_insert=False`) ends the session and frees all."""
        if req.session_id is None:
            return self.inner.cache_finished_req(req, is_insert=is_insert)
        session = self._sessions.get(req.session_id)
        if not is_insert or req.skip_insert or (session is not None and session.closing):
            self._sessions.pop(req.session_id, None)
            return self.inner.cache_finished_req(req, is_insert=is_insert)
        self._sessions[req.session_id] = _Session(
            token_ids=req.token_ids[: req.committed_len].copy(),
            namespace=req.key().namespace,
            kv_indices=req.kv_indices,
            swa_indices=req.swa_indices,
            swa_evicted_len=req.swa_evicted_len,
            lock=req.handle,
            protected_len=req.protected_len,
        )
        req.kv_indices = req.swa_indices = NO_SLOTS
        req.handle, req.protected_len, req.swa_evicted_len = None, 0, 0
        return NOTHING_FREED

    def cancel_turn(self, req: CacheRequest) -> EvictResult:
        """Undo `begin_turn` of a turn that has computed nothing; the session keeps what it held.

        Returns what the turn owned beyond the session, which is nothing unless it grew its row.
        """
        session = None if req.session_id is None else self._sessions.get(req.session_id)
        if session is None or not session.in_use or session.closing:
            return self.cache_finished_req(req, is_insert=False)
        kept = min(len(session.kv_indices), req.committed_len)
        freed = EvictResult(req.kv_indices[kept:], req.swa_indices[kept:])
        session.kv_indices, session.swa_indices = req.kv_indices[:kept], req.swa_indices[:kept]
        session.token_ids = session.token_ids[:kept]
        session.lock, session.protected_len = req.handle, req.protected_len
        session.swa_evicted_len = min(req.swa_evicted_len, kept)
        session.in_use = False
        req.kv_indices = req.swa_indices = NO_SLOTS
        req.handle, req.protected_len, req.swa_evicted_len = None, 0, 0
        return freed

    def close_session(self, session_id: str) -> EvictResult:
        """End a session and return what it owned; while a turn runs, it ends with that turn. Unknown ones are ended."""
        session = self._sessions.get(session_id)
        if session is None:
            return NOTHING_FREED
        if session.in_use:
            session.closing = True
            return NOTHING_FREED
        del self._sessions[session_id]
        own_swa = max(session.protected_len, session.swa_evicted_len)
        freed = EvictResult(session.kv_indices[session.protected_len :], session.swa_indices[own_swa:])
        late = NOTHING_FREED if session.lock is None else self.inner.dec_lock_ref(session.lock)
        return _together(freed, late)

    def reset(self) -> SlotArray:
        """Forget everything, idle sessions included; turns that run keep their rows."""
        held = [s.kv_indices[s.protected_len :] for s in self._sessions.values() if not s.in_use]
        self._sessions.clear()
        return np.concatenate([self.inner.reset(), *held])

    def check(self) -> None:
        """Verify the wrapped cache."""
        self.inner.check()

    def _session_id(self, params: MatchPrefixParams | RadixKey) -> str | None:
        req = None if isinstance(params, RadixKey) else params.req
        return req.session_id if isinstance(req, CacheRequest) else None

    @staticmethod
    def _shared_len(session: _Session, key: RadixKey) -> int:
        """Tokens of the session that `key` repeats and that a turn can go on from; -1 if it cannot.

        It cannot in another namespace, nor in the middle of a row whose windows have moved on.
        """
        if session.namespace != key.namespace:
            return -1
        length = min(common_prefix_len(session.token_ids, key.token_ids), len(key))
        windows = session.swa_indices[:length]
        return -1 if length < len(session.kv_indices) and bool((windows < 0).any()) else length


def _together(first: EvictResult, second: EvictResult) -> EvictResult:
    return EvictResult(np.concatenate([first.freed, second.freed]), np.concatenate([first.swa_freed, second.swa_freed]))
