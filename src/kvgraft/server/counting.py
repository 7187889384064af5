"""`POST /v1/messages/count_tokens`, `/v1/responses/input_tokens`: how many tokens a conversation has, and which."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.engine.requests.options import RequestOptions
from kvgraft.http.body import read_object
from kvgraft.http.fields import Fields
from kvgraft.server.body_fields import RETURN_TOKEN_IDS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request

    from kvgraft.server.answer import JSONObject
    from kvgraft.server.context import ServerContext
    from kvgraft.server.conversation import PreparedChat


async def counted(
    request: Request, context: ServerContext, prepare: Callable[[Fields], Awaitable[PreparedChat]]
) -> JSONObject:
    """Return `input_tokens`, and `prompt_token_ids` if the body asks for them; nothing is computed.

    Args:
        request: Its body is one that would be answered, or has less.
        context: The server.
        prepare: Reads the body and renders its conversation.

    Raises:
        APIError: A field is wrong; the error names it.
        ConfigError: The prompt is too long.
    """
    fields = Fields(await read_object(request, context.config.max_body_bytes))
    wants_ids = fields.flag(RETURN_TOKEN_IDS)
    chat = await prepare(Fields({key: value for key, value in fields.values.items() if key != RETURN_TOKEN_IDS}))
    special = chat.options.request.add_special_tokens
    built = await context.engine.build(chat.prompt, RequestOptions(reuse="off", add_special_tokens=special))
    answer: JSONObject = {"input_tokens": len(built.token_ids)}
    return answer | ({"prompt_token_ids": [int(token) for token in built.token_ids]} if wants_ids else {})
