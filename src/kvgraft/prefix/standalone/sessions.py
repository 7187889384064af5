"""Streaming sessions: turns of one client that append to each other keep their KV between turns, whole, page tail included.

Between two turns the session holds the row and the lock that the last request had; the next turn continues it without
a lookup. What a session holds is in no other hands: `session_held_tokens` is part of the owner's balance
`available + evictable + protected + session_held + held by requests == total`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvgraft.errors import ConfigError
from kvgraft.prefix.base import PrefixCache
from kvgraft.prefix.key import RadixKey, common_prefix_len
from kvgraft.prefix.results import (
    NO_SLOTS,
    NOTHING_FREED,
    EvictResult,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
    OutlineNode,
    PrefixHandle,
    SlotArray,
    StoredLength,
    join_results,
)
from kvgraft.prefix.ssm.cache import StateRadixCache
from kvgraft.prefix.standalone.request import RequestRow


class SessionHandle(PrefixHandle):
    """A session's row as a match; its locks do nothing, because the session itself holds the lock below."""

    __slots__ = ("session_id",)

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id


@dataclass(slots=True, eq=False)
class _Session:
    """A session: row and lock between turns, and who uses them now."""

    held: RequestRow
    """What the session holds; while a turn runs, nothing but the tokens that the turn began with."""
    in_use: bool = False
    closing: bool = False
    """Whether the session ends with that turn."""


class StreamingSession(PrefixCache):
    """Wraps a cache and adds sessions; requests without `session_id` pass through. Not thread-safe.

    Turns of a session run one after another. A turn whose prompt departs from what the session holds frees the
    departing tail first. A session holds its KV until it is closed, or until a turn is aborted after it has started.
    """

    def __init__(self, inner: PrefixCache) -> None:
        if isinstance(inner, StateRadixCache):
            raise ConfigError("a streaming session keeps no state to go on from; use StateRadixCache alone")
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
        return sum(len(s.held.own_slots(s.held.protected_len).freed) for s in self._idle())

    @property
    def session_held_swa_tokens(self) -> int:
        """Sliding-window slots that idle sessions own."""
        return sum(len(s.held.own_slots(s.held.protected_len).swa_freed) for s in self._idle())

    def supports_streaming_session(self) -> bool:
        """Return True: sessions are kept."""
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
        if length < session.held.protected_len:
            return self.inner.match_prefix(params)
        return MatchResult([session.held.kv_indices[:length].copy()], length, SessionHandle(session_id))

    def look(self, key: RadixKey) -> StoredLength:
        """As the wrapped cache."""
        return self.inner.look(key)

    def begin_turn(self, req: RequestRow) -> EvictResult:
        """Let `req` start from its session or, without one, from a match in the wrapped cache.

        Locks what it starts from, sets the row, and returns what the session held after the point of departure.

        Raises:
            ConfigError: Another turn of the session is running.
        """
        session = None if req.session_id is None else self._sessions.get(req.session_id)
        if session is None:
            return self._begin_fresh(req)
        if session.in_use:
            raise ConfigError(f"session {req.session_id!r} has a turn running; finish or abort it first")
        length = self._shared_len(session, req.key(max(len(req.token_ids) - 1, 0)))
        if length < session.held.protected_len:
            freed = self.close_session(req.session_id or "")
            return join_results(freed, self._begin_fresh(req))
        session.in_use = True
        session.held.token_ids = session.held.token_ids[:length]
        return req.take_over(session.held, length)

    def _begin_fresh(self, req: RequestRow) -> EvictResult:
        match = self.inner.match_prefix(MatchPrefixParams(req.key(max(len(req.token_ids) - 1, 0)), req))
        req.adopt(match, self.inner.inc_lock_ref(match.handle))
        return NOTHING_FREED

    def insert(
        self,
        key: RadixKey,
        kv_indices: SlotArray | None = None,
        *,
        after: PrefixHandle | None = None,
        priority: int = 0,
        counted_len: int | None = None,
    ) -> InsertResult:
        """As the wrapped cache."""
        return self.inner.insert(key, kv_indices, after=after, priority=priority, counted_len=counted_len)

    def evict(self, num_tokens: int) -> EvictResult:
        """As the wrapped cache; what sessions hold stays."""
        return self.inner.evict(num_tokens)

    def inc_lock_ref(self, handle: PrefixHandle) -> PrefixHandle:
        """As the wrapped cache; a session's handle needs no lock."""
        return handle if isinstance(handle, SessionHandle) else self.inner.inc_lock_ref(handle)

    def dec_lock_ref(self, handle: PrefixHandle) -> EvictResult:
        """As the wrapped cache; a session's handle holds no lock."""
        return NOTHING_FREED if isinstance(handle, SessionHandle) else self.inner.dec_lock_ref(handle)

    def path_slots(self, handle: PrefixHandle, start: int = 0) -> SlotArray:
        """As the wrapped cache."""
        return self.inner.path_slots(handle, start)

    def cache_unfinished_req(self, req: RequestRow) -> EvictResult:
        """As the wrapped cache: chunks of a turn are shared like any others."""
        return self.inner.cache_unfinished_req(req)

    def cache_finished_req(self, req: RequestRow, *, is_insert: bool = True) -> EvictResult:
        """Keep row and lock of a turn for the next one; an abort (`is_insert=False`) ends the session and frees all."""
        if req.session_id is None:
            return self.inner.cache_finished_req(req, is_insert=is_insert)
        session = self._sessions.get(req.session_id)
        if not is_insert or req.skip_insert or (session is not None and session.closing):
            self._sessions.pop(req.session_id, None)
            return self.inner.cache_finished_req(req, is_insert=is_insert)
        held = RequestRow(
            req.session_id,
            req.token_ids[: req.committed_len].copy(),
            NO_SLOTS,
            extra_key=req.extra_key,
            cache_salt=req.cache_salt,
            is_bigram=req.is_bigram,
        )
        self._sessions[req.session_id] = _Session(held)
        return held.take_over(req, req.committed_len)

    def cancel_turn(self, req: RequestRow) -> EvictResult:
        """Undo `begin_turn` of a turn that has computed nothing; the session keeps what it held.

        Returns what the turn owned beyond the session, which is nothing unless it grew its row.
        """
        session = None if req.session_id is None else self._sessions.get(req.session_id)
        if session is None or not session.in_use or session.closing:
            return self.cache_finished_req(req, is_insert=False)
        held, session.in_use = session.held, False
        held.token_ids = held.token_ids[: req.committed_len]
        return held.take_over(req, len(held.token_ids))

    def close_session(self, session_id: str) -> EvictResult:
        """End a session and return what it owned; while a turn runs, it ends with that turn. Unknown ones are ended."""
        session = self._sessions.get(session_id)
        if session is None:
            return NOTHING_FREED
        if session.in_use:
            session.closing = True
            return NOTHING_FREED
        del self._sessions[session_id]
        return self.inner.cache_finished_req(session.held, is_insert=False)

    def reset(self) -> SlotArray:
        """Forget everything, idle sessions included; turns that run keep their rows."""
        held = [s.held.own_slots(s.held.protected_len).freed for s in self._idle()]
        self._sessions.clear()
        return np.concatenate([self.inner.reset(), *held])

    def outline(self, limit: int) -> list[OutlineNode]:
        """Return nodes of the wrapped cache's tree."""
        return self.inner.outline(limit)

    def check(self) -> None:
        """Verify the wrapped cache."""
        self.inner.check()

    def _idle(self) -> list[_Session]:
        return [session for session in self._sessions.values() if not session.in_use]

    def _session_id(self, params: MatchPrefixParams | RadixKey) -> str | None:
        req = None if isinstance(params, RadixKey) else params.req
        return req.session_id if isinstance(req, RequestRow) else None

    @staticmethod
    def _shared_len(session: _Session, key: RadixKey) -> int:
        """Tokens of the session that `key` repeats and that a turn can go on from; -1 if it cannot.

        It cannot in another namespace, nor in the middle of a row with windows that have moved on.
        """
        held = session.held
        if held.key().namespace != key.namespace:
            return -1
        length = min(common_prefix_len(held.token_ids, key.token_ids), len(key))
        windows = held.swa_indices[:length]
        return -1 if length < len(held.kv_indices) and bool((windows < 0).any()) else length
