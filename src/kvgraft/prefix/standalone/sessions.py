"""Streaming sessions: turns of one client that append to each other keep their KV between turns, whole, page tail included.

Between two turns the session holds the row and the lock that the last request had; the next turn continues it without
a lookup. What a session holds is in no other hands: `session_held_tokens` is part of the owner's balance
`available + evictable + protected + session_held + held by requests == total`.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvgraft.errors import ConfigError
from kvgraft.prefix.base import PrefixCache
from kvgraft.prefix.request import RequestRow
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
from kvgraft.prefix.swa.cache import SWARadixCache
from kvgraft.token_key import RadixKey, common_prefix_len


class SessionHandle(PrefixHandle):
    """A session's row as a match; its locks do nothing, because the session itself holds the lock below."""

    __slots__ = ("session_id",)

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id


@dataclass(slots=True, eq=False)
class _Session:
    """A session: row and lock between turns, and who uses them now."""

    held: RequestRow | None
    """What the session holds; while a turn runs, nothing but the tokens that the turn began with. None in the first turn."""
    turn: RequestRow | None = None
    """The request that runs; None between two turns."""
    begun_len: int = 0
    """Positions that it began with."""
    closing: bool = False
    """Whether the session ends with that turn."""


class StreamingSession(PrefixCache):
    """Wraps a cache and adds sessions; requests that `begin_turn` did not begin pass through. Not thread-safe.

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
        return sum(len(held.own_slots(held.protected_len).freed) for held in self._idle())

    @property
    def session_held_swa_tokens(self) -> int:
        """Sliding-window slots that idle sessions own."""
        return sum(len(held.own_slots(held.protected_len).swa_freed) for held in self._idle())

    def supports_streaming_session(self) -> bool:
        """Return True: sessions are kept."""
        return True

    def match_prefix(self, params: MatchPrefixParams | RadixKey) -> MatchResult:
        """Match a session's row for its next turn, anything else in the wrapped cache.

        Slots of a departing tail are not freed by a lookup: `begin_turn` does that, and it alone hands the row out.
        """
        session_id = self._session_id(params)
        session = None if session_id is None else self._sessions.get(session_id)
        if session_id is None or session is None or session.turn is not None or isinstance(params, RadixKey):
            return self.inner.match_prefix(params)
        held = _idle_row(session)
        length = _shared_len(held, params.key)
        if length < held.protected_len:
            return self.inner.match_prefix(params)
        return MatchResult([held.kv_indices[:length].copy()], length, SessionHandle(session_id))

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
        if session.turn is not None:
            raise ConfigError(f"session {req.session_id!r} has a turn running; finish or abort it first")
        held = _idle_row(session)
        length = _shared_len(held, req.key(max(len(req.token_ids) - 1, 0)))
        if length < held.protected_len:
            freed = self.close_session(req.session_id or "")
            return join_results(freed, self._begin_fresh(req))
        session.turn, session.begun_len = req, length
        held.token_ids = held.token_ids[: _num_named(held, length)]
        return req.take_over(held, length)

    def _begin_fresh(self, req: RequestRow) -> EvictResult:
        match = self.inner.match_prefix(MatchPrefixParams(req.key(max(len(req.token_ids) - 1, 0)), req))
        req.adopt(match, self.inner.inc_lock_ref(match.handle))
        if req.session_id is not None:
            self._sessions[req.session_id] = _Session(None, turn=req)
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
        _require_row(req)
        return self.inner.cache_unfinished_req(req)

    def cache_finished_req(self, req: RequestRow, *, is_insert: bool = True) -> EvictResult:
        """Keep row and lock of a turn for the next one; an abort (`is_insert=False`) ends the session and frees all.

        Raises:
            CorruptCacheError: The cache was reset since the turn began, see `PrefixCache`. No session is kept.
        """
        _require_row(req)
        session = self._session_of(req)
        if session is None:
            return self.inner.cache_finished_req(req, is_insert=is_insert)
        if not is_insert or req.skip_insert or session.closing:
            del self._sessions[req.session_id or ""]
            return self.inner.cache_finished_req(req, is_insert=is_insert)
        session.held, session.turn = _empty_row(req), None
        return session.held.take_over(req, req.committed_len)

    def cancel_turn(self, req: RequestRow) -> EvictResult:
        """Undo `begin_turn` of a turn that has computed nothing; the session keeps what it held.

        Returns what the turn owned beyond the session, which is nothing unless it grew its row.
        """
        session = self._session_of(req)
        if session is None or session.held is None or session.closing or req.protected_len > session.begun_len:
            return self.cache_finished_req(req, is_insert=False)
        session.turn = None
        return session.held.take_over(req, session.begun_len)

    def close_session(self, session_id: str) -> EvictResult:
        """End a session and return what it owned; while a turn runs, it ends with that turn. Unknown ones are ended."""
        session = self._sessions.get(session_id)
        if session is None:
            return NOTHING_FREED
        if session.turn is not None:
            session.closing = True
            return NOTHING_FREED
        del self._sessions[session_id]
        return self.inner.cache_finished_req(_idle_row(session), is_insert=False)

    def reset(self) -> SlotArray:
        """Forget everything, idle sessions included; returns slots of tokens. `reset_both` returns those of windows, too.

        Turns that run are turns of no session any more, and stale as any request is.
        """
        return self.reset_both().freed

    def reset_both(self) -> EvictResult:
        """Forget everything, idle sessions included, and return every slot of both pools for the caller to free."""
        held = [row.own_slots(row.protected_len) for row in self._idle()]
        self._sessions.clear()
        inner = self.inner
        forgotten = inner.reset_both() if isinstance(inner, SWARadixCache) else EvictResult(inner.reset())
        return join_results(forgotten, *held)

    def rebuild(self) -> None:
        """See `PrefixCache.rebuild`; idle sessions are forgotten, too."""
        self._sessions.clear()
        self.inner.rebuild()

    def outline(self, limit: int) -> list[OutlineNode]:
        """Return nodes of the wrapped cache's tree."""
        return self.inner.outline(limit)

    def check(self) -> None:
        """Verify the wrapped cache."""
        self.inner.check()

    def _idle(self) -> list[RequestRow]:
        """What sessions without a turn hold."""
        return [_idle_row(session) for session in self._sessions.values() if session.turn is None]

    def _session_id(self, params: MatchPrefixParams | RadixKey) -> str | None:
        req = None if isinstance(params, RadixKey) else params.req
        return req.session_id if isinstance(req, RequestRow) else None

    def _session_of(self, req: RequestRow) -> _Session | None:
        """The session of which `req` is the present turn; None for any other request, as one that ran over a reset."""
        session = None if req.session_id is None else self._sessions.get(req.session_id)
        return session if session is not None and session.turn is req else None


def _idle_row(session: _Session) -> RequestRow:
    assert session.held is not None, "between two turns a session holds a row"
    return session.held


def _require_row(req: RequestRow) -> None:
    if isinstance(req.handle, SessionHandle):
        raise ConfigError(
            "the row was adopted from the match of a session, which holds it, too; begin turns with begin_turn"
        )


def _empty_row(req: RequestRow) -> RequestRow:
    """Return a row of the tokens of `req` that stand for its positions and its lock."""
    return RequestRow(
        req.session_id or "",
        req.token_ids[: _num_named(req, req.committed_len)].copy(),
        NO_SLOTS,
        extra_key=req.extra_key,
        cache_salt=req.cache_salt,
        is_bigram=req.is_bigram,
    )


def _num_named(row: RequestRow, length: int) -> int:
    """Tokens that name the first `length` positions; the last locked pair of a bigram view may have one more."""
    return max(length, row.protected_len + row.is_bigram)


def _shared_len(held: RequestRow, key: RadixKey) -> int:
    """Positions of a session's row that `key` repeats and that a turn can go on from; -1 if it cannot.

    It cannot in another namespace, nor in the middle of a row with windows that have moved on.
    """
    if held.key().namespace != key.namespace:
        return -1
    shared = common_prefix_len(held.token_ids, key.token_ids)
    if shared < len(held.token_ids):
        shared = max(shared - held.is_bigram, 0)  # the pair in which they part is another
    length = min(shared, len(key), held.committed_len)
    windows = held.swa_indices[:length]
    return -1 if length < held.committed_len and bool((windows < 0).any()) else length
