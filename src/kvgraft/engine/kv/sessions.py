"""Sessions: turns of one client, each of which continues the one before and may send only what is new.

A session remembers its tokens and has the space keep their K/V (`KVSpace.keep`): those of a full prefill, or after a graft
what its last answer was drawn from, which only a turn that accepts copies goes on from. A turn that fails or is cancelled
leaves its session as it was.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.config import quoted
from kvgraft.errors import ConfigError, CorruptCacheError, OverloadedError, SessionInUseError, UnknownSessionError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvgraft.engine.kv.kv_space import KVSpace
    from kvgraft.engine.requests.request import Request, SessionName
    from kvgraft.engine.requests.request_builder import RequestBuilder
    from kvgraft.types import TokenArray


@dataclass(slots=True, eq=False)
class OpenSession:
    """One session between and in its turns.

    Attributes:
        ttl_s: Seconds after which it is closed if no turn runs.
        used_at: When it was opened or a turn ended.
        token_ids: int64, text of its turns so far.
        turn: Request that is its present turn, or None.
    """

    name: SessionName
    ttl_s: float
    used_at: float
    token_ids: TokenArray = field(default_factory=lambda: np.empty(0, np.int64))
    turn: str | None = None


class Sessions:
    """All open sessions of an engine. Not thread-safe.

    Invariants (verified by `check`):
        - A turn belongs to one open session, or to one that was closed since.
        - Nothing is kept in the space but for open sessions.
    """

    def __init__(
        self,
        space: KVSpace,
        builder: RequestBuilder,
        *,
        max_sessions: int,
        ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin without sessions.

        Args:
            space: Keeps their K/V.
            builder: Appends what is new to what a session holds.
            max_sessions: So many may be open.
            ttl_s: Seconds after which an idle one is closed; the longest that may be asked for.
            clock: Seconds that only advance.
        """
        self._space = space
        self._builder = builder
        self._max_sessions = max_sessions
        self._ttl_s = ttl_s
        self.clock = clock
        self._open: dict[SessionName, OpenSession] = {}
        self._turns: dict[str, OpenSession] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, name: SessionName, ttl_s: float | None = None) -> OpenSession:
        """Open a session; without an id it gets one.

        Raises:
            ConfigError: `ttl_s` is out of range.
            SessionInUseError: There is one of that name.
            OverloadedError: As many are open as may be.
        """
        self.expire()
        ttl_s = self._ttl_s if ttl_s is None else ttl_s
        if isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float) or not 0 < ttl_s <= self._ttl_s:
            raise ConfigError(f"ttl_s must be above 0 and at most {self._ttl_s:g}, not {quoted(ttl_s)}")
        if not self._max_sessions:
            raise ConfigError("this engine keeps no sessions; raise max_sessions")
        name = name if name.session_id else name._replace(session_id=uuid.uuid4().hex)
        if name in self._open:
            raise SessionInUseError(f"session {quoted(name.session_id)} is open already; close it or choose another id")
        if len(self._open) >= self._max_sessions:
            raise OverloadedError(f"{self._max_sessions} sessions are open already; close some or try again later")
        session = self._open[name] = OpenSession(name, ttl_s, self.clock())
        return session

    def close(self, name: SessionName) -> None:
        """Forget a session; a turn of it that runs goes on, and nothing is kept of it.

        Raises:
            UnknownSessionError: There is none.
        """
        self.expire()
        self._forget(self._find(name))

    def begin(self, request: Request) -> Request:
        """Let `request` be the present turn of its session; what it appends follows what the session holds.

        Raises:
            UnknownSessionError: The session is not open.
            SessionInUseError: Another turn of it waits or runs.
            ConfigError: Both together are too long.
        """
        if request.session is None:
            return request
        self.expire()
        session = self._find(request.session.name)
        if session.turn is not None:
            raise SessionInUseError(
                f"session {quoted(session.name.session_id)} has a turn that is not done; wait for it or cancel it"
            )
        if request.session.append_ids is not None and len(session.token_ids):
            request = self._builder.continued(session.token_ids, request, request.session.append_ids)
        session.turn = request.request_id
        self._turns[request.request_id] = session
        return request

    def keeps(self, request_id: str) -> SessionName | None:
        """Name under which the K/V of a request that ends are kept; None if it is no turn of an open session."""
        session = self._turns.get(request_id)
        return session.name if session is not None and self._open.get(session.name) is session else None

    def end(self, request_id: str, token_ids: TokenArray) -> None:
        """Let the session of a turn that is done hold `token_ids`, prompt and answer."""
        session = self._turns.pop(request_id, None)
        if session is not None:
            session.turn, session.token_ids, session.used_at = None, token_ids, self.clock()

    def cancel(self, request_id: str) -> None:
        """Leave the session of a turn that came to nothing as it was."""
        session = self._turns.pop(request_id, None)
        if session is not None:
            session.turn, session.used_at = None, self.clock()

    def expire(self) -> None:
        """Close what has been idle for too long."""
        if not self._open:
            return
        now = self.clock()
        for session in [s for s in self._open.values() if s.turn is None and now - s.used_at >= s.ttl_s]:
            self._forget(session)

    def reset(self) -> None:
        """Close all of them."""
        for session in list(self._open.values()):
            self._forget(session)

    def rebuild(self) -> None:
        """Forget all of them and their turns without a look at them; the space begins anew, too."""
        self._open.clear()
        self._turns.clear()

    def check(self) -> None:
        """Verify every invariant; for tests and idle time.

        Raises:
            CorruptCacheError: The first one that does not hold.
        """
        if any(session.turn != request_id for request_id, session in self._turns.items()):
            raise CorruptCacheError("a turn belongs to a session that knows of another")
        if any(s.turn is not None and s.turn not in self._turns for s in self._open.values()):
            raise CorruptCacheError("a session waits for a turn that no request runs")
        if not self._open.keys() >= self._space.kept.names:
            raise CorruptCacheError("K/V are kept for a session that is not open")

    def _find(self, name: SessionName) -> OpenSession:
        session = self._open.get(name)
        if session is None:
            raise UnknownSessionError(
                f"there is no session {quoted(name.session_id)} of yours, or not any more; open one and send all of it"
            )
        return session

    def _forget(self, session: OpenSession) -> None:
        del self._open[session.name]
        self._space.let_go(session.name)
