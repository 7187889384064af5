"""State that all endpoints of the router share."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from typing import TYPE_CHECKING, Any

import aiohttp

from kvgraft.router.metrics import RouterMetrics
from kvgraft.router.monitor import Monitor
from kvgraft.router.parity import Parity
from kvgraft.router.policy import Prompt
from kvgraft.router.prompts import UnreadPromptError, UnreadReason, accepts_copies
from kvgraft.tokenising import TextLanes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request

    from kvgraft.router.core import Router
    from kvgraft.router.gateway import Gateway
    from kvgraft.router.prompts import PromptReader

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 << 20
_KEEPALIVE_S = 30
_SAID_ELSEWHERE = (UnreadReason.NO_TOKENIZER, UnreadReason.PATH, UnreadReason.DIFFERS)
"""Reasons that the start of the router or of a worker has named."""


class RouterContext:
    """One router; lives on the event loop from `start` to `close`.

    Attributes:
        router: Scores and chooses.
        prompts: Reads the tokens of requests.
        gateway: Where everything is sent, with a header that names the worker; None to send it to the worker itself.
        metrics: What is counted.
        keep_alive_s: After so long without a byte a stream gets a comment; None for never.
        lanes: Threads on which bodies are read and scored.
        draining: No more requests are taken.
        session: HTTP to the workers.
        monitor: Asks the workers how they are.
    """

    session: aiohttp.ClientSession
    monitor: Monitor

    def __init__(
        self,
        router: Router,
        prompts: PromptReader,
        gateway: Gateway | None = None,
        *,
        keep_alive_s: float | None = None,
    ) -> None:
        self.router = router
        self.prompts = prompts
        self.gateway = gateway
        self.keep_alive_s = keep_alive_s
        self.lanes = TextLanes()
        self.metrics = RouterMetrics(router)
        self.draining = False
        self._unread: set[UnreadReason] = set()
        self._closing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Connect, and learn which workers answer."""
        # Bodies are passed on as they are, compressed or not; how many connections there may be is said by the router's
        # limit.
        connector = aiohttp.TCPConnector(limit=0, socket_factory=_watched_socket)
        # Cookies, encodings and names of software are the clients' own: nothing is kept, added or asked for.
        self.session = aiohttp.ClientSession(
            connector=connector,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
        )
        self.monitor = Monitor(self.router.loads.values(), self.session, Parity(self.prompts, self.metrics))
        await self.monitor.start()

    async def close(self, grace_s: float) -> None:
        """Take no more requests, let running ones go on for `grace_s`. Later calls wait for the first."""
        self.draining = True
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close(grace_s))
        await asyncio.shield(self._closing)

    def prompt(self, path: str, body: Mapping[str, object], raw: bytes) -> Prompt:
        """Return a request as policies see it."""
        model, salt = body.get("model"), body.get("cache_salt")
        scope = self.router.scope_of(model if isinstance(model, str) else "", salt if isinstance(salt, str) else "")
        try:
            return Prompt(self.prompts.tokens(path, body), scope, raw, accepts_copies(body))
        except UnreadPromptError as error:
            self.unread(error.reason, str(error))
            return Prompt(None, scope, raw)

    def unread(self, reason: UnreadReason, detail: str) -> None:
        """Count a prompt that is not read here, and name the first of each reason in the log."""
        self.metrics.unread(reason)
        if reason not in self._unread and reason not in _SAID_ELSEWHERE:
            logger.warning("a prompt is not read, so it goes to the least loaded worker; said once: %s", detail)
        self._unread.add(reason)

    async def _close(self, grace_s: float) -> None:
        until = time.monotonic() + grace_s
        while time.monotonic() < until and any(load.num_in_flight for load in self.router.loads.values()):
            await asyncio.sleep(0.05)
        await self.monitor.close()
        await self.session.close()
        await asyncio.to_thread(self.router.close)


def context_of(request: Request) -> RouterContext:
    """Return the context of the app that handles `request`."""
    context = request.app.state.context
    assert isinstance(context, RouterContext)
    return context


def _watched_socket(address: tuple[Any, ...]) -> socket.socket:
    """Return a socket that probes its other end when nothing comes: a host that vanishes sends no farewell."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_S)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    return made
