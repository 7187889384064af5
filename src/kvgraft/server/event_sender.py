"""Send server-sent events, and comments where a stream is silent: proxies cut connections on which nothing moves."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from starlette.types import Send

STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies of the nginx family would hold events back
)
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which readers of events pass over."""


class EventSender:
    """Sends the events of one response; its head goes out with the first bytes. Belongs to an event loop.

    Attributes:
        started: The head is sent, or about to be: nothing but events can follow.
    """

    def __init__(
        self,
        send: Send,
        *,
        keep_alive_s: float = 0.0,
        status: int = 200,
        headers: Sequence[tuple[bytes, bytes]] = STREAM_HEADERS,
    ) -> None:
        """Begin a response.

        Args:
            send: Of the ASGI server.
            keep_alive_s: Seconds of silence after which a comment is sent; 0 sends none.
            status: Of the response.
            headers: Of the response.
        """
        self.started = False
        self._send = send
        self._keep_alive_s = keep_alive_s
        self._head = {"type": "http.response.start", "status": status, "headers": list(headers)}
        self._admitted = asyncio.Event()
        self._is_writing = asyncio.Lock()
        self._spoke_at = 0.0

    async def send(self, data: bytes, name: str = "") -> None:
        """Send an event.

        Args:
            data: One line.
            name: Of the event, if it has one.
        """
        head = f"event: {name}\n".encode() if name else b""
        await self.write(head + b"data: " + data + b"\n\n")

    async def write(self, data: bytes) -> None:
        """Send whole events as they are."""
        async with self._is_writing:
            if not self.started:
                self.started = True
                await self._send(self._head)
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
            self._spoke_at = _now()

    async def end(self) -> None:
        """End the response: no event follows."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def admit(self) -> None:
        """Say that the request is accepted: from now on silence is broken. What fails before is an HTTP error."""
        self._spoke_at = _now()
        self._admitted.set()

    @asynccontextmanager
    async def kept_alive(self) -> AsyncGenerator[None]:
        """Send a comment whenever nothing was sent for `keep_alive_s`, from `admit` on and until the context ends."""
        beats = asyncio.create_task(self._beat()) if self._keep_alive_s else None
        try:
            yield
        finally:
            if beats is not None:
                async with self._is_writing:  # never between a head and its first bytes
                    beats.cancel()
                await asyncio.gather(beats, return_exceptions=True)

    async def _beat(self) -> None:
        await self._admitted.wait()
        while True:
            left_s = self._spoke_at + self._keep_alive_s - _now()
            if left_s > 0:
                await asyncio.sleep(left_s)
            else:
                await self.write(KEEP_ALIVE)
                await asyncio.sleep(self._keep_alive_s)  # a write may not have waited, and others need a turn


def _now() -> float:
    return asyncio.get_running_loop().time()
