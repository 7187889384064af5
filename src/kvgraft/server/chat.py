"""`POST /v1/chat/completions`: answer a conversation."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING

from kvgraft.server.access_log import access_of
from kvgraft.server.answer import ChatForm
from kvgraft.server.body import read_object
from kvgraft.server.chat_template import render_chat
from kvgraft.server.completions import MAX_TOKENS
from kvgraft.server.context import context_of
from kvgraft.server.fields import Fields
from kvgraft.server.messages import parse_messages, parse_tools
from kvgraft.server.options import MAX_LOGPROBS, check_model, parse_options, refuse
from kvgraft.server.response import GenerationResponse

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request

DEFAULT_CHAT_TOKENS = 2048
"""`max_tokens` of a chat that names none, if so many fit: OpenAI sets no limit, a model that never stops would."""
_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "tool_choice": ("none", "auto"),
    "modalities": (["text"],),
    "audio": ({},),
}


async def create_chat_completion(request: Request) -> GenerationResponse:
    """Answer a conversation, rendered by the model's chat template, whole or as a stream."""
    context = context_of(request)
    fields = Fields(await read_object(request, context.config.max_body_bytes))
    check_model(fields, context.model_id)
    refuse(fields, _UNSUPPORTED)
    messages, tools = parse_messages(fields), parse_tools(fields)
    options = parse_options(
        fields, max_tokens=_max_tokens(fields), logprobs=_logprobs(fields), default_reuse=context.config.reuse
    )
    prompt = await asyncio.to_thread(render_chat, context.engine.loaded.tokenizer, messages, tools)
    form = ChatForm()
    answer_id = access_of(request.scope).answer_id = form.id_prefix + uuid.uuid4().hex
    return GenerationResponse(
        context,
        answer_id,
        form,
        options.with_stops(prompt.stop),
        [prompt.text],
        add_special_tokens=prompt.add_special_tokens,
    )


def _max_tokens(fields: Fields) -> int:
    key = "max_completion_tokens" if fields.has("max_completion_tokens") else "max_tokens"
    return fields.integer(key, DEFAULT_CHAT_TOKENS, 1, MAX_TOKENS)


def _logprobs(fields: Fields) -> int | None:
    top = fields.integer("top_logprobs", 0, 0, MAX_LOGPROBS)
    if fields.flag("logprobs"):
        return top
    if top:
        raise fields.error("top_logprobs", "needs logprobs to be true")
    return None
