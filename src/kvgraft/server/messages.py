"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's form of a chat."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvgraft.http.access_log import access_of
from kvgraft.http.body import read_object
from kvgraft.http.fields import Fields
from kvgraft.http.json_io import json_response
from kvgraft.server.arguments import body_error
from kvgraft.server.body_fields import Endpoint
from kvgraft.server.chat import DEFAULT_CHAT_TOKENS
from kvgraft.server.chat_form import ChatForm
from kvgraft.server.completions import MAX_TOKENS
from kvgraft.server.context import context_of
from kvgraft.server.conversation import prepare_chat
from kvgraft.server.counting import counted
from kvgraft.server.document_fields import chat_documents
from kvgraft.server.messages_answer import MessagesWriter
from kvgraft.server.options import check_model, parse_options
from kvgraft.server.response import GenerationResponse
from kvgraft.server.sampling_fields import MAX_STOP_CHARS, MAX_STOPS
from kvgraft.server.served_fields import served_conversation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request
    from starlette.responses import Response

    from kvgraft.server.answer import JSONObject
    from kvgraft.server.context import ServerContext
    from kvgraft.server.conversation import PreparedChat
    from kvgraft.server.echo import PromptEcho
    from kvgraft.server.generation import ChoiceRequest
    from kvgraft.server.logprobs import TokenTexts

_ID_PREFIX = "msg_"


async def create_message(request: Request) -> GenerationResponse:
    """Answer a conversation, whole or in Anthropic's events."""
    context = context_of(request)
    fields, chat = await _prepared(Fields(await read_object(request, context.config.max_body_bytes)), context)
    documents = await asyncio.to_thread(chat_documents, fields, chat.prompt)
    chat = replace(chat, options=chat.options.with_fields(documents=documents))
    answer_id = access_of(request.scope).answer_id = _ID_PREFIX + uuid.uuid4().hex
    return MessagesResponse(context, answer_id, chat, fields)


async def count_tokens(request: Request) -> Response:
    """Return how many tokens the prompt of a conversation has; nothing is computed."""
    context = context_of(request)

    async def prepare(fields: Fields) -> PreparedChat:
        return (await _prepared(fields, context))[1]

    return json_response(await counted(request, context, prepare))


class MessagesResponse(GenerationResponse):
    """An ASGI app that computes one message and sends it."""

    def __init__(self, context: ServerContext, answer_id: str, chat: PreparedChat, fields: Fields) -> None:
        """Take a request; `fields` are its body, and what `chat` was made of."""
        blame = partial(body_error, fields=fields, endpoint=Endpoint.MESSAGES)
        super().__init__(context, answer_id, ChatForm(), chat.options, [chat.prompt], blame=blame)
        self._reading = chat.reading
        self._stops = fields.texts("stop_sequences", max_items=MAX_STOPS, max_chars=MAX_STOP_CHARS)

    def _answer(
        self, head: JSONObject, choices: Sequence[ChoiceRequest], texts: TokenTexts, echoes: Sequence[PromptEcho]
    ) -> MessagesWriter:
        del echoes  # this endpoint has none
        reader = None if self._reading is None else self._reading.reader()
        return MessagesWriter(head, self._form, choices, texts, self._options, stops=self._stops, reader=reader)


async def _prepared(fields: Fields, context: ServerContext) -> tuple[Fields, PreparedChat]:
    """Read a body and render its conversation; returns the body as it is served, too."""
    check_model(fields, context.model_id)
    read = served_conversation(context, fields, Endpoint.MESSAGES)
    fields, chat, tokenizer = read.fields, read.chat, context.engine.loaded.tokenizer
    fields.texts("stop_sequences", max_items=MAX_STOPS, max_chars=MAX_STOP_CHARS)
    options = parse_options(
        chat,
        max_tokens=chat.integer("max_tokens", DEFAULT_CHAT_TOKENS, 1, MAX_TOKENS),
        logprobs=None,
        default_reuse=context.config.reuse,
        tokenizer=tokenizer,
    )
    if options.request.provisional:
        raise fields.section("kvgraft").error("provisional", "has no events in /v1/messages; use /v1/chat/completions")
    options = replace(options, left_out=read.left_out)
    return fields, await asyncio.to_thread(prepare_chat, tokenizer, context.config, read.conversation, options)
