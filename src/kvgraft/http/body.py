"""Read a request body within its limits of size and time, if it is clear where it ends and how it is written."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvgraft.http.access_log import note_error
from kvgraft.http.errors import APIError, BadRequestError, ClientDisconnectedError
from kvgraft.http.json_io import parse_object

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

_LENGTHS = frozenset({b"content-length", b"transfer-encoding"})
_LONG_BODY = 1 << 16
"""Bytes from which reading takes milliseconds, in which the event loop answers others."""
BODY_TIMEOUT_S = 60.0
"""A body of the default limit arrives in this time at 70 KB/s."""


class OneLength:
    """Middleware that refuses bodies with two statements of their length (RFC 9112, section 6.1).

    A proxy that believes `Content-Length` takes for the next client's request what `Transfer-Encoding` makes part of this
    one, or the other way round. The connection ends, because the beginning of the next request is unknown.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 400."""
        if scope["type"] != "http" or not _LENGTHS.issubset(name for name, _ in scope["headers"]):
            await self._app(scope, receive, send)
            return
        error = APIError(
            400,
            "the body's length is said twice, by Content-Length and by Transfer-Encoding; send one of them",
            code="ambiguous_length",
            headers={"connection": "close"},
        )
        note_error(scope, error)
        await error.response()(scope, receive, send)


async def read_object(request: Request, max_bytes: int) -> dict[str, object]:
    """Return the JSON object that was sent.

    Raises:
        APIError: 415 for another content type or a compressed body, 413 for too many bytes, 408 for too slow ones, 400 for
            a bad body.
        ClientDisconnectedError: The client left in between.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in {"identity", ""}:
        message = f"the body is compressed ({encoding[:60]!r}); send it without compression"
        raise APIError(415, message, headers={"accept-encoding": "identity"})
    body = await read_body(request, max_bytes)
    try:
        return parse_object(body) if len(body) < _LONG_BODY else await asyncio.to_thread(parse_object, body)
    except ValueError as error:
        raise BadRequestError(str(error), code="invalid_json") from error


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return the bytes that were sent, of what says that it is JSON; errors as of `read_object`."""
    media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media_type != "application/json":
        raise APIError(415, "the body must be sent with the header 'Content-Type: application/json'")
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await _read(request, max_bytes)
    except TimeoutError as error:
        raise APIError(408, f"the body did not arrive within {BODY_TIMEOUT_S:.0f} seconds") from error


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
        if not message.get("more_body", False):
            return bytes(body)


def _too_large(max_bytes: int) -> APIError:
    message = f"the body is larger than {max_bytes:,} bytes; send less or raise max_body_bytes"
    return APIError(413, message, code="body_too_large")
