"""A body with a conversation as it is served: its fields checked, what is not served left out, named and logged."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvgraft.http.fields import Fields
from kvgraft.server.field_table import check_fields
from kvgraft.server.rendering import read_conversation

if TYPE_CHECKING:
    from kvgraft.server.body_fields import Endpoint
    from kvgraft.server.context import ServerContext
    from kvgraft.server.rendering import ReadConversation


def served_conversation(context: ServerContext, fields: Fields, endpoint: Endpoint) -> ReadConversation:
    """Return the conversation of a body, without what is not served.

    Args:
        context: The server.
        fields: The whole body.
        endpoint: Endpoint of the body.

    Raises:
        APIError: It has a field that is unknown or wrong, or that would change what the answer means; the error names it.
    """
    not_served = check_fields(fields, endpoint)
    kept = {name: value for name, value in fields.values.items() if name not in not_served}
    read = read_conversation(endpoint, Fields(kept), context.engine.loaded.tokenizer)
    read = replace(read, left_out=(*not_served, *read.left_out))
    context.left_out.note(read.left_out)
    return read
