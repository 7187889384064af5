"""API keys: `Authorization: Bearer KEY`, or `x-api-key: KEY`, on everything but /health and /metrics."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING

from kvgraft.http.access_log import note_error
from kvgraft.http.errors import APIError
from kvgraft.inspector import key_digest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import ASGIApp, Receive, Scope, Send

OPEN_PATHS = frozenset({"/health", "/metrics"})
"""Of probes: they show no texts, and need no key."""
UI_PATH = "/ui"
"""Of the inspector, for which browsers present a key in a way of their own (`kvgraft.inspector.access`)."""


def owner_of(scope: Scope, keys: Sequence[str]) -> str:
    """Return an identity of a client, for what belongs to it: a digest of its key, or one for all without keys."""
    return key_digest(_presented(scope)[1]).hex() if keys else ""


class BearerAuth:
    """Middleware that lets requests with a known key pass, and all of them if there are no keys."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [key_digest(key.encode("ascii")) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] != "http" or not self._digests or _is_open(scope) or self._accepts(scope):
            await self._app(scope, receive, send)
            return
        error = APIError(
            401,
            "a valid API key is needed; send it as 'Authorization: Bearer KEY'",
            kind="authentication_error",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )
        note_error(scope, error)
        await error.response(scope["path"])(scope, receive, send)

    def _accepts(self, scope: Scope) -> bool:
        """Compare digests with every key, in time that does not depend on which one fits or how much of it."""
        scheme, key = _presented(scope)
        digest = key_digest(key)
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme == b"bearer" and any(matches)


def is_page(path: str) -> bool:
    """Return whether `path` is the inspector's page or of it."""
    return path == UI_PATH or path.startswith(f"{UI_PATH}/")


def _is_open(scope: Scope) -> bool:
    return scope["path"] in OPEN_PATHS or is_page(scope["path"])


def _presented(scope: Scope) -> tuple[bytes, bytes]:
    """Scheme in lower case and credentials of a request; Anthropic's clients send a header that has no scheme."""
    headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))
    given = headers.get(b"authorization") or b"Bearer " + headers.get(b"x-api-key", b"")
    scheme, _, key = given.partition(b" ")
    return scheme.lower(), key.strip()
