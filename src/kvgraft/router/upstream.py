"""One try of a request at one worker: its answer up to the first byte, then the rest as it comes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp

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


class UpstreamError(Exception):
    """A worker failed before the first byte of its answer.

    Attributes:
        refused: Nobody listens there.
    """

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class BrokenStreamError(Exception):
    """A worker failed in the middle of its answer."""


@dataclass(slots=True, eq=False)
class Answer:
    """An answer whose head and first bytes are there.

    Attributes:
        status: HTTP status.
        headers: What is passed on.
        is_stream: Server-sent events, of which more come; else `first` is everything.
        first: The bytes so far.
    """

    status: int
    headers: list[tuple[bytes, bytes]]
    is_stream: bool
    first: bytes
    _response: aiohttp.ClientResponse

    @property
    def asks_to_retry(self) -> bool:
        """Whether another worker may give a better one."""
        return self.status in _RETRIED_STATUS

    async def events(self) -> AsyncIterator[bytes]:
        """Yield whole server-sent events as they come, several at a time.

        Raises:
            BrokenStreamError: The worker broke off; what it began to say of an event is not passed on.
        """
        whole, held = _whole_events(self.first)
        if whole:
            yield whole
        try:
            async for chunk in self._response.content.iter_any():
                whole, held = _whole_events(held + chunk)
                if whole:
                    yield whole
        except _FAILURES as error:
            raise BrokenStreamError(str(error) or type(error).__name__) from error
        if held:
            yield held

    def close(self) -> None:
        """Let the worker know that nobody listens any more, if it has not said everything."""
        self._response.close()


async def ask(session: aiohttp.ClientSession, url: str, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> Answer:
    """Send a request and wait for the first bytes of a stream, or for the whole of another answer.

    Raises:
        UpstreamError: The worker cannot be reached or breaks off before that.
    """
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
    response = None
    try:
        response = await session.post(
            url, data=body, headers=_passed_on(headers), timeout=timeout, allow_redirects=False
        )
        is_stream = response.content_type == "text/event-stream"
        first = await response.content.readany() if is_stream else await response.read()
        if is_stream and not first:
            raise UpstreamError("it ended the stream in front of the first event")  # noqa: TRY301 - closed below
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
    return Answer(response.status, kept, is_stream, first, response)


def _passed_on(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    texts = [(_text(name).lower(), _text(value)) for name, value in headers]
    left_out = _HOP_BY_HOP | _nominated(texts)
    return [(name, value) for name, value in texts if name not in left_out]


def _nominated(headers: Iterable[tuple[str, str]]) -> set[str]:
    """Headers that the sender says concern this connection alone."""
    named = (value for name, value in headers if name == "connection")
    return {name.strip().lower() for value in named for name in value.split(",")}


def _text(raw: bytes) -> str:
    """What is written as `raw` again, if it is UTF-8; other bytes beyond ASCII become UTF-8 of the same characters."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def _whole_events(data: bytes) -> tuple[bytes, bytes]:
    """Cut behind the last event that is whole."""
    ends = [found + len(end) for end in (b"\n\n", b"\r\n\r\n") if (found := data.rfind(end)) >= 0]
    cut = max(ends, default=0)
    return data[:cut], data[cut:]
