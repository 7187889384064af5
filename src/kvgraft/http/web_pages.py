"""Keep out web pages that were not let in: a browser sends their requests from inside, where no key is asked for.

Two kinds of page reach a server on a user's machine: one of another origin, whose requests come without a preflight where
they are simple enough, and one with a name that was made to mean this machine (DNS rebinding), which a browser takes for the
server's own page. Where there are keys neither has one, and nothing is checked here.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware

from kvgraft.http.access_log import note_error
from kvgraft.http.auth import OPEN_PATHS, is_page
from kvgraft.http.errors import APIError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import ASGIApp, Receive, Scope, Send

_READS = frozenset({"GET", "HEAD"})
_FOREIGN_SITES = frozenset({"cross-site", "same-site"})
_REMEDY = "give the server an api_key, or list the page's origin in cors_origin"


class KnownPages:
    """Middleware for a server without keys: requests of web pages pass if their origin is the server's own or let in.

    A name in the header `Host` is the server's own if no other machine can have it: an address, `localhost`, what the server
    was set to listen on, or a name in `cors_origin`. It is looked at where a browser says who asks, and on connections
    from this machine to itself; elsewhere others know the machine by names of theirs.
    """

    def __init__(self, app: ASGIApp, host: str, origins: Sequence[str]) -> None:
        self._app = app
        self._origins = frozenset(origin.lower() for origin in origins)
        self._names = {"localhost", host.lower(), *(urlsplit(origin).hostname for origin in self._origins)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 403."""
        refusal = self._refusal(scope) if scope["type"] == "http" and "*" not in self._origins else None
        if refusal is None:
            await self._app(scope, receive, send)
            return
        note_error(scope, refusal)
        await refusal.response()(scope, receive, send)

    def _refusal(self, scope: Scope) -> APIError | None:
        headers = Headers(scope=scope)
        origin, host = headers.get("origin", "").lower(), headers.get("host")
        if origin in self._origins:
            return None
        is_asked = (origin or _is_loopback(scope.get("server"))) and scope["path"] not in OPEN_PATHS
        if host is not None and is_asked and not self._is_own(host):
            return _refused("host", f"{host[:100]!r} is no name of this server that a web page may use")
        is_foreign = scope["method"] not in _READS and headers.get("sec-fetch-site") in _FOREIGN_SITES
        if is_foreign or (origin and origin != f"{scope['scheme']}://{host}".lower()):
            return _refused("origin", "this server lets no web page of another origin in")
        return None

    def _is_own(self, host: str) -> bool:
        name = (host if host.endswith("]") else host.rpartition(":")[0] or host).lower()
        return name in self._names or name.endswith(".localhost") or _is_address(name)


class APICORS(CORSMiddleware):
    """Lets web pages read what the API answers, and never what the inspector's page shows."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        is_api = scope["type"] == "http" and not is_page(scope["path"])
        await (super().__call__ if is_api else self.app)(scope, receive, send)


def _refused(what: str, problem: str) -> APIError:
    return APIError(403, f"{problem}; {_REMEDY}", kind="permission_error", code=f"{what}_not_allowed")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _is_loopback(server: tuple[str, int | None] | None) -> bool:
    """Return whether a connection came in at an address that this machine alone reaches."""
    try:
        address = ipaddress.ip_address("" if server is None else server[0])
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
