"""Read a request body within its limits of size and time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvgraft.server.errors import APIError, BadRequestError, ClientDisconnectedError
from kvgraft.server.json_io import parse_object

if TYPE_CHECKING:
    from starlette.requests import Request

BODY_TIMEOUT_S = 60.0
"""A body of the default limit arrives in this time at 70 KB/s."""


async def read_object(request: Request, max_bytes: int) -> dict[str, object]:
    """Return the JSON object that was sent.

    Raises:
        APIError: 415 for another content type, 413 for too many bytes, 408 for too slow ones, 400 for a bad body.
        ClientDisconnectedError: The client left in between.
    """
    body = await read_body(request, max_bytes)
    try:
        return parse_object(body)
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
