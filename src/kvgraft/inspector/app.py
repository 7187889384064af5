"""The page's endpoints: its files, what it lists, a stream of news, and a request in full."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route

from kvgraft.explain.page import page
from kvgraft.explain.palette import PALETTE
from kvgraft.inspector.access import Access
from kvgraft.inspector.entries import Filter
from kvgraft.inspector.following import followed
from kvgraft.inspector.rows import row
from kvgraft.inspector.state import state_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.requests import Request
    from starlette.types import ASGIApp

    from kvgraft.engine.inspection import DonorFacts, Inspection, LiveRequest
    from kvgraft.engine.requests.risk import AuditFacts
    from kvgraft.inspector.entries import Entry
    from kvgraft.inspector.file_source import FileSource
    from kvgraft.inspector.source import Source

_PERIOD_S = 1.0
_MOST_ROWS = 200
"""Requests of one answer; the page asks for older ones when its user does."""
_MOST_STREAMS = 16
_MOST_DIGITS = 15
_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".txt": "text/plain"}
_REPORT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)
"""Of a request's own page, which is one file with its style in it and has no scripts."""


def create_inspector(source: Source, key: str = "") -> ASGIApp:
    """Return an ASGI app that shows `source` to holders of `key`; without a key, to this machine alone.

    The app that mounts it follows the source (`following.followed`): mounted apps learn of no start and no end.
    """
    return Access(_Inspector(source).app(), key)


def inspector_server(source: FileSource, key: str = "") -> Starlette:
    """Return an app of its own that shows `source` at `/ui/`, as `create_inspector` does, and closes it in the end."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        async with followed(source):
            yield

    app = Starlette(
        routes=[Route(path, lambda _: RedirectResponse("/ui/")) for path in ("/", "/ui")]
        + [Mount("/ui", create_inspector(source, key))],
        lifespan=lifespan,
    )
    app.state.context = source
    return app


class _Inspector:
    """Endpoints over one source; lives on one event loop."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._epoch = secrets.token_hex(4)
        self._num_streams = 0

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/", self.index),
                Route("/static/palette.css", self.palette),
                Route("/static/{name}", self.static),
                Route("/events", self.events),
                Route("/api/requests", self.requests),
                Route("/api/reports", self.reports),
                Route("/api/engine", self.engine),
                Route("/requests/{number}", self.request),
            ]
        )

    async def index(self, _request: Request) -> Response:
        """The page."""
        return _file("inspector.html")

    async def palette(self, _request: Request) -> Response:
        """Colours, which a request's own page has too."""
        return Response(PALETTE, media_type="text/css")

    async def static(self, request: Request) -> Response:
        """A file of the page."""
        return _file(request.path_params["name"])

    async def requests(self, request: Request) -> Response:
        """Requests in descending order, 200 at most: `before` a number, with `text` in them, of a `reuse`."""
        query = request.query_params
        before = query.get("before", "0")
        if not _is_number(before):
            return PlainTextResponse("before must be a number\n", 400)
        await self._source.refresh()
        which = Filter(query.get("text", "").lower(), query.get("reuse", ""))
        found = self._source.log.select(which, before=int(before), limit=_MOST_ROWS)
        return JSONResponse({"epoch": self._epoch, "requests": await _rows(found)})

    async def reports(self, request: Request) -> Response:
        """Reports of requests with `text` in them as report files have them, 200 at most, in ascending order."""
        await self._source.refresh()
        which = Filter(request.query_params.get("text", "").lower())
        found = self._source.log.select(which, limit=_MOST_ROWS)
        entries = [entry for entry in reversed(found) if entry.explained is not None]
        return JSONResponse(await asyncio.to_thread(lambda: [_told(entry) for entry in entries]))

    async def request(self, request: Request) -> Response:
        """What is known of a request, as `kvgraft explain --html` writes it."""
        number = request.path_params["number"]
        entry = self._source.log.get(int(number)) if _is_number(number) else None
        if entry is None:
            return PlainTextResponse("this request is not kept any more\n", 404)
        explained = entry.explained
        if explained is None:
            return PlainTextResponse("this request ended before its prompt was computed, and has no report\n", 404)
        html = await asyncio.to_thread(lambda: page([explained()]))
        return HTMLResponse(html, headers={"content-security-policy": _REPORT_POLICY})

    async def engine(self, _request: Request) -> Response:
        """Requests on their way, donors and prefixes; null where there is no engine to look into."""
        found = await self._source.inspection()
        return JSONResponse(None if found is None else _shown(found))

    async def events(self, request: Request) -> Response:
        """News once a second as server-sent events: figures, and requests after the last event that the browser has seen.

        The first event has the figures of the last hour, too: of a browser that comes back, some time is missing.
        """
        if self._num_streams >= _MOST_STREAMS:
            return PlainTextResponse(f"{_MOST_STREAMS} browsers watch already; close one\n", 503)
        epoch, _, seen = request.headers.get("last-event-id", "").partition("-")
        last = int(seen) if epoch == self._epoch and _is_number(seen) else None
        headers = {"x-accel-buffering": "no"}
        return StreamingResponse(self._news(last), media_type="text/event-stream", headers=headers)

    async def _news(self, last: int | None) -> AsyncGenerator[str]:
        self._num_streams += 1
        try:
            yield "retry: 1000\n\n"
            past = {"timeline": self._source.timeline.as_dicts()}
            while not self._source.is_closing:
                await self._source.refresh()
                newest = self._source.log.newest
                rows = self._source.log.select(Filter(), after=last or 0, limit=_MOST_ROWS)
                news = {
                    "epoch": self._epoch,
                    "name": self._source.name,
                    "at": time.time(),
                    "newest": newest,
                    "state": state_of(await self._source.samples()),
                    "requests": await _rows(rows),
                    **past,
                }
                yield f"id: {self._epoch}-{newest}\ndata: {json.dumps(news)}\n\n"
                last, past = newest, {}
                await asyncio.sleep(_PERIOD_S)
        finally:
            self._num_streams -= 1


async def _rows(entries: list[Entry]) -> list[dict[str, Any]]:
    """Rows of the list, made off the event loop: those of long prompts with many spans take a while."""
    return await asyncio.to_thread(lambda: [row(entry) for entry in entries])


def _shown(found: Inspection) -> dict[str, Any]:
    """An engine's state as JSON. `dataclasses.asdict` copies every number, in several times the time."""
    return {
        "requests": [_fields(each) for each in found.requests],
        "num_requests": found.num_requests,
        "donors": [_fields(each) for each in found.donors],
        "num_donors": found.num_donors,
        "prefixes": found.prefixes,
        "audits": [_fields(each) for each in found.audits],
    }


def _fields(facts: LiveRequest | DonorFacts | AuditFacts) -> dict[str, Any]:
    return {name: getattr(facts, name) for name in facts.__slots__}


def _told(entry: Entry) -> dict[str, Any]:
    """A request as a line of a report file; without its text."""
    assert entry.explained is not None
    explained = entry.explained()
    return {
        "request_id": explained.request_id,
        "outcome": explained.outcome,
        "output_tokens": explained.output_tokens,
        "attempts": [dict(attempt.raw) for attempt in explained.attempts],
    }


def _is_number(text: str) -> bool:
    """Return whether this can be a request's number."""
    return text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS


def _file(name: str) -> Response:
    folder = files("kvgraft.inspector") / "static"
    known = {each.name: each for each in folder.iterdir()}
    media_type = _MEDIA_TYPES.get(name[name.rfind(".") :])
    if name not in known or media_type is None:
        return PlainTextResponse("there is no such file\n", 404)
    return Response(known[name].read_bytes(), media_type=media_type)
