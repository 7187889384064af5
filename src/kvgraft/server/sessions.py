"""`POST /v1/sessions`, `DELETE /v1/sessions/{id}`: open and close sessions; and what a body says about them."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from kvgraft.http.auth import owner_of
from kvgraft.http.body import read_object
from kvgraft.http.fields import Fields
from kvgraft.http.json_io import json_response
from kvgraft.server.body_fields import Endpoint
from kvgraft.server.context import context_of
from kvgraft.server.field_table import check_fields
from kvgraft.server.options import MAX_SALT_CHARS, check_model

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from kvgraft.engine.requests.options import SessionFields

_SESSION_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")


async def open_session(request: Request) -> Response:
    """Open a session for the client's key and salt."""
    context = context_of(request)
    fields = Fields(await read_object(request, context.config.max_body_bytes))
    check_model(fields, context.model_id)
    check_fields(fields, Endpoint.SESSIONS)
    ttl_s = fields.number("ttl_s", 0, 0, context.engine.config.session_ttl_s) if fields.has("ttl_s") else None
    if ttl_s == 0:
        raise fields.error("ttl_s", "must be above 0")
    session_id, ttl_s = await context.engine.open_session(
        _session_id(fields, "id"),
        ttl_s=ttl_s,
        cache_salt=fields.text("cache_salt", max_chars=MAX_SALT_CHARS),
        owner=owner_of(request.scope, context.config.api_key),
    )
    return json_response({"id": session_id, "object": "session", "created": int(time.time()), "ttl_s": ttl_s})


async def close_session(request: Request) -> Response:
    """Close a session of the client's key and of the salt in the query."""
    context = context_of(request)
    session_id = str(request.path_params["id"])
    await context.engine.close_session(
        session_id,
        cache_salt=request.query_params.get("cache_salt", ""),
        owner=owner_of(request.scope, context.config.api_key),
    )
    return json_response({"id": session_id, "object": "session", "deleted": True})


def parse_session(fields: Fields, request: Request, *, append: bool, num_choices: int) -> SessionFields:
    """Read `session_id`; return what it asks of the engine, nothing without one.

    Raises:
        APIError: It is no id, or the request has more than one choice: a session goes on with one answer.
    """
    if not fields.has("session_id"):
        return {}
    session_id = _session_id(fields, "session_id")
    if num_choices != 1:
        raise fields.error("session_id", "goes with one prompt and n of 1: a session goes on with one answer")
    owner = owner_of(request.scope, context_of(request).config.api_key)
    return {"session_id": session_id, "owner": owner, "append": append}


def _session_id(fields: Fields, key: str) -> str:
    """Return an id, an empty text if there is none."""
    session_id = fields.text(key)
    if fields.has(key) and not _SESSION_ID.fullmatch(session_id):
        raise fields.error(key, "must have 1 to 128 letters, digits and ._:-")
    return session_id
