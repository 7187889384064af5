"""Requests whose target is a whole address, as clients send them that take the server for their proxy."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

_SCHEMES = ("http://", "https://")


class OriginForm:
    """Middleware that makes `GET http://host/path` what it means: `GET /path` of that host (RFC 9112, section 3.2.2)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] == "http" and scope["path"].lower().startswith(_SCHEMES):
            scope = _in_origin_form(scope)
        await self._app(scope, receive, send)


def _in_origin_form(scope: Scope) -> Scope:
    """Return the request with the path of its target, and the target's host in place of the header's."""
    host, _, path = scope["path"].partition("://")[2].partition("/")
    raw_path = scope["raw_path"].partition(b"://")[2].partition(b"/")[2]
    headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
    headers.append((b"host", host.encode("utf-8", "replace")))
    return {**scope, "path": f"/{path}", "raw_path": b"/" + raw_path, "headers": headers}
