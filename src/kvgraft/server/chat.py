"""`POST /v1/chat/completions`: answer a conversation."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvgraft.http.access_log import access_of
from kvgraft.http.body import read_object
from kvgraft.http.fields import Fields
from kvgraft.server.aliases import with_our_names
from kvgraft.server.arguments import body_error
from kvgraft.server.body_fields import Endpoint
from kvgraft.server.chat_form import ChatForm
from kvgraft.server.completions import MAX_TOKENS
from kvgraft.server.context import context_of
from kvgraft.server.conversation import prepare_chat
from kvgraft.server.document_fields import chat_documents
from kvgraft.server.options import check_model, parse_options
from kvgraft.server.response import GenerationResponse
from kvgraft.server.sampling_fields import MAX_LOGPROBS
from kvgraft.server.served_fields import served_conversation
from kvgraft.server.sessions import parse_session

if TYPE_CHECKING:
    from starlette.requests import Request

DEFAULT_CHAT_TOKENS = 2048
"""`max_tokens` of a chat that names none, if so many fit: OpenAI sets no limit, a model that never stops would."""
_MAX_TOKENS = ("max_tokens", "max_completion_tokens")


async def create_chat_completion(request: Request) -> GenerationResponse:
    """Answer a conversation, rendered by the model's chat template, whole or as a stream."""
    context = context_of(request)
    fields = with_our_names(Fields(await read_object(request, context.config.max_body_bytes)))
    check_model(fields, context.model_id)
    read = served_conversation(context, fields, Endpoint.CHAT)
    fields, tokenizer = read.fields, context.engine.loaded.tokenizer
    options = parse_options(
        fields,
        max_tokens=_max_tokens(fields),
        logprobs=_logprobs(fields),
        default_reuse=context.config.reuse,
        tokenizer=tokenizer,
    )
    options = replace(options, left_out=read.left_out)
    session = parse_session(fields, request, append=False, num_choices=options.n)
    chat = await asyncio.to_thread(prepare_chat, tokenizer, context.config, read.conversation, options)
    documents = await asyncio.to_thread(chat_documents, fields, chat.prompt)
    form = ChatForm(chat.reading)
    answer_id = access_of(request.scope).answer_id = form.id_prefix + uuid.uuid4().hex
    return GenerationResponse(
        context,
        answer_id,
        form,
        chat.options.with_fields(documents=documents, **session),
        [chat.prompt],
        blame=partial(body_error, fields=fields, endpoint=Endpoint.CHAT),
    )


def _max_tokens(fields: Fields) -> int:
    """Read `max_tokens`, under its older name or its newer one."""
    older, newer = (fields.integer(key, DEFAULT_CHAT_TOKENS, 1, MAX_TOKENS) for key in _MAX_TOKENS)
    if older != newer and all(fields.has(key) for key in _MAX_TOKENS):
        raise fields.error("max_tokens", f"is {older} and max_completion_tokens is {newer}; leave out one of them")
    return newer if fields.has("max_completion_tokens") else older


def _logprobs(fields: Fields) -> int | None:
    top = fields.integer("top_logprobs", 0, 0, MAX_LOGPROBS)
    if fields.flag("logprobs"):
        return top
    if top:
        raise fields.error("top_logprobs", "needs logprobs to be true")
    return None
