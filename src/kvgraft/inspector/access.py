"""Access to the page: for holders of its key, or browsers on this machine where there is none."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
from typing import TYPE_CHECKING

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HERE = frozenset({"localhost", "127.0.0.1", "[::1]"})
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; frame-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Access:
    """Middleware that lets holders of `key` pass, and adds headers that keep browsers from running what is not ours.

    The key comes as the password of HTTP's basic scheme, for which browsers ask by themselves, or as a bearer token. Without
    a key only this machine may look, and only under a name of its own: a web page elsewhere that has its name resolved to
    this machine is refused.
    """

    def __init__(self, app: ASGIApp, key: str = "") -> None:
        self._app = app
        self._digest = key_digest(key.encode()) if key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401 or 403."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        await (refusal or self._app)(scope, receive, _with_headers(send))

    def _refusal(self, scope: Scope) -> PlainTextResponse | None:
        if self._digest is not None:
            if hmac.compare_digest(key_digest(_presented(scope)), self._digest):
                return None
            return PlainTextResponse(
                "the page's key is needed, as the password; any name will do\n",
                401,
                {"www-authenticate": 'Basic realm="kvgraft", charset="UTF-8"'},
            )
        if _is_here(scope):
            return None
        return PlainTextResponse("without a key this page is for this machine alone; give --ui-key\n", 403)


def _with_headers(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers.setdefault("content-security-policy", PAGE_POLICY)
            headers.setdefault("cache-control", "no-store")
            headers["x-content-type-options"] = "nosniff"
            headers["referrer-policy"] = "no-referrer"
            headers["cross-origin-resource-policy"] = "same-origin"
        await send(message)

    return send_with_headers


def _presented(scope: Scope) -> bytes:
    scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return given.strip().encode()
    if scheme.lower() != "basic":
        return b""
    try:
        return base64.b64decode(given.strip(), validate=True).partition(b":")[2]
    except (binascii.Error, ValueError):
        return b""


def _is_here(scope: Scope) -> bool:
    client = scope.get("client")
    host = Headers(scope=scope).get("host", "")
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    try:
        return name.lower() in _HERE and client is not None and ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        return False


def key_digest(key: bytes) -> bytes:
    """Return 32 bytes that stand for a key: comparing two takes the same time for all keys."""
    return hashlib.sha256(key).digest()
