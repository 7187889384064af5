"""A body as it is served: its fields checked, what is not served left out, named and logged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.http.chat_template import template_of
from kvgraft.http.fields import Fields
from kvgraft.http.left_out import ServedBody, served_chat, served_message, served_response
from kvgraft.server.body_fields import Endpoint
from kvgraft.server.field_table import check_fields

if TYPE_CHECKING:
    from kvgraft.server.context import ServerContext

_READERS = {Endpoint.CHAT: served_chat, Endpoint.RESPONSES: served_response, Endpoint.MESSAGES: served_message}


def served_body(context: ServerContext, fields: Fields, endpoint: Endpoint) -> ServedBody:
    """Return a body of a conversation without what is not served.

    Args:
        context: The server.
        fields: The whole body.
        endpoint: Endpoint of the body.

    Raises:
        BadRequestError: It has a field that is unknown, or that would change what the answer means; the error names it.
    """
    not_served = check_fields(fields, endpoint)
    template = template_of(context.engine.loaded.tokenizer, with_tools=fields.has("tools"))
    kept = {name: value for name, value in fields.values.items() if name not in not_served}
    body = _READERS[endpoint](Fields(kept), template)
    left_out = (*not_served, *body.left_out)
    context.left_out.note(left_out)
    return ServedBody(body.fields, left_out)
