"""One try of a request at one worker: how its answer begins, then the rest as it comes, in bounded memory."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp

from kvgraft.router.events import EventCutter

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

CONNECT_TIMEOUT_S = 5.0
_HOP_BY_HOP = frozenset(
    {
        *(
            "connection",
            "keep-alive",
            "proxy-authenticate",
            "proxy-authorization",
            "te",
            "trailer",
            "transfer-encoding",
        ),
        *("upgrade", "host", "content-length", "expect"),
    }
)
"""Headers that concern one connection (RFC 9110, section 7.6.1), and those that are written anew."""
_NOT_PASSED_BACK = _HOP_BY_HOP | {"date", "server", "x-request-id"}
_FAILURES = (aiohttp.ClientError, asyncio.TimeoutError, OSError)
_RETRIED_STATUS = frozenset({429, 502, 503})
"""Answers of a worker that takes no more requests at the moment; another one may."""


_SHORT_BYTES = 1 << 20
"""Answers up to this length are waited for, so that another worker can be asked if they break off; longer ones are not."""
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which readers of events pass over."""


class UpstreamError(Exception):
    """A worker failed before anything of its answer was passed on.

    Attributes:
        refused: The connection was refused.
    """

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class BrokenStreamError(Exception):
    """A worker failed in the middle of its answer."""


@dataclass(slots=True, eq=False)
class Answer:
    """An answer with its head and its beginning.

    Attributes:
        status: HTTP status.
        headers: What is passed on.
        is_stream: Server-sent events that can be read; compressed ones are bytes to which nothing can be added.
        first: The bytes so far; none of a stream that is idle for so long that its client should get a sign of life.
        length: Of the whole body, where the worker says it or it is here.
    """

    status: int
    headers: list[tuple[bytes, bytes]]
    is_stream: bool
    first: bytes
    length: int | None
    _response: aiohttp.ClientResponse

    @property
    def asks_to_retry(self) -> bool:
        """Whether another worker may give a better one."""
        return self.status in _RETRIED_STATUS

    async def pieces(self, idle_s: float | None) -> AsyncIterator[bytes]:
        """Yield the body as it comes: of a stream whole events, several at a time, but for events that are very long.

        Args:
            idle_s: After so long without a byte of a stream `KEEP_ALIVE` is yielded, where that is no part of an event.

        Raises:
            BrokenStreamError: The worker broke off. Of an event of which nothing was yielded nothing is; one that was begun
                is ended, so that another can follow.
        """
        cutter = EventCutter()
        try:
            async for chunk in self._chunks(idle_s if self.is_stream else None):
                piece = chunk
                if self.is_stream:
                    piece = (b"" if cutter.is_inside else KEEP_ALIVE) if chunk is None else cutter.take(chunk)
                if piece:
                    yield piece
        except _FAILURES as error:
            if cutter.is_inside:
                yield b"\n\n"
            raise BrokenStreamError(str(error) or type(error).__name__) from error
        if rest := cutter.rest():
            yield rest

    async def _chunks(self, idle_s: float | None) -> AsyncIterator[bytes | None]:
        """Yield what comes, and None whenever nothing came for `idle_s`."""
        chunk: bytes | None = self.first if self.first or not self.is_stream else None
        while chunk != b"":
            yield chunk
            chunk = await _next_chunk(self._response, idle_s)

    def close(self) -> None:
        """Close the connection to the worker, if it has not sent everything."""
        self._response.close()


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    headers: Iterable[tuple[bytes, bytes]],
    body: bytes,
    idle_s: float | None = None,
) -> Answer:
    """Send a request and wait for the first bytes of a stream, or for the whole of another answer if it is short.

    Args:
        session: HTTP.
        url: Where to.
        headers: Of the client.
        body: As it came.
        idle_s: How long to wait for the first bytes of a stream that has begun; None for as long as it takes.

    Raises:
        UpstreamError: The worker cannot be reached or breaks off before that.
    """
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
    response = None
    try:
        response = await session.post(
            url, data=body, headers=_passed_on(headers), timeout=timeout, allow_redirects=False
        )
        has_events = response.content_type == "text/event-stream"
        is_stream = has_events and not _is_compressed(response)
        first = await (_next_chunk(response, idle_s if is_stream else None) if has_events else _beginning(response))
        if has_events and first == b"":
            raise UpstreamError("it ended the stream before the first event")  # noqa: TRY301 - closed below
    except BaseException as error:
        if response is not None:
            response.close()
        if isinstance(error, _FAILURES):
            refused = isinstance(error, aiohttp.ClientConnectorError)
            raise UpstreamError(str(error) or type(error).__name__, refused=refused) from error
        raise
    raw = [(name.lower(), value) for name, value in response.raw_headers]
    left_out = _NOT_PASSED_BACK | _nominated((_text(name), _text(value)) for name, value in raw)
    kept = [(name, value) for name, value in raw if _text(name) not in left_out]
    length = len(first or b"") if response.content.at_eof() else response.content_length
    return Answer(response.status, kept, is_stream, first or b"", length, response)


def _is_compressed(response: aiohttp.ClientResponse) -> bool:
    return response.headers.get("content-encoding", "").strip().lower() not in ("", "identity")


async def _next_chunk(response: aiohttp.ClientResponse, idle_s: float | None) -> bytes | None:
    """Return the next piece: empty at the end, None if nothing comes for `idle_s`."""
    try:
        async with asyncio.timeout(idle_s) as patience:
            return await response.content.readany()
    except TimeoutError:
        if patience.expired():
            return None
        raise


async def _beginning(response: aiohttp.ClientResponse) -> bytes:
    """Return all of a short answer, or as much of a long one as is waited for."""
    begun = bytearray()
    while len(begun) <= _SHORT_BYTES and (chunk := await response.content.readany()):
        begun += chunk
    return bytes(begun)


def _passed_on(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    texts = [(_text(name).lower(), _text(value)) for name, value in headers]
    left_out = _HOP_BY_HOP | _nominated(texts)
    return [(name, value) for name, value in texts if name not in left_out]


def _nominated(headers: Iterable[tuple[str, str]]) -> set[str]:
    """Return the headers that the sender limits to this connection."""
    named = (value for name, value in headers if name == "connection")
    return {name.strip().lower() for value in named for name in value.split(",")}


def _text(raw: bytes) -> str:
    """Return the text that is written as `raw` again, if it is UTF-8; other bytes beyond ASCII become UTF-8."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("latin-1")
