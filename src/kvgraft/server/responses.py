"""`POST /v1/responses`: OpenAI's newer form of a chat. Nothing is stored: a request brings the whole conversation."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvgraft.http.access_log import access_of
from kvgraft.http.body import read_object
from kvgraft.http.chat_template import template_of
from kvgraft.http.fields import Fields
from kvgraft.http.json_io import json_bytes
from kvgraft.server.arguments import body_error
from kvgraft.server.body_fields import Endpoint
from kvgraft.server.chat_form import ChatForm
from kvgraft.server.context import context_of
from kvgraft.server.conversation import Conversation, prepare_chat
from kvgraft.server.document_fields import chat_documents
from kvgraft.server.options import check_model
from kvgraft.server.response import GenerationResponse
from kvgraft.server.responses_answer import ResponsesWriter
from kvgraft.server.responses_input import parse_input, parse_rendering, parse_response_options
from kvgraft.server.served_fields import served_body
from kvgraft.server.tools import parse_tool_use

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request

    from kvgraft.server.answer import JSONObject
    from kvgraft.server.context import ServerContext
    from kvgraft.server.conversation import PreparedChat
    from kvgraft.server.echo import PromptEcho
    from kvgraft.server.generation import ChoiceRequest
    from kvgraft.server.logprobs import TokenTexts

_ID_PREFIX = "resp_"
_REPEATED = ("metadata", "reasoning", "text", "tool_choice", "tools")
"""Fields with values of any depth that stand in responses."""


async def create_response(request: Request) -> GenerationResponse:
    """Answer a conversation of items, whole or in typed events."""
    context = context_of(request)
    fields = Fields(await read_object(request, context.config.max_body_bytes))
    check_model(fields, context.model_id)
    body = served_body(context, fields, Endpoint.RESPONSES)
    fields = body.fields
    tokenizer = context.engine.loaded.tokenizer
    tools = parse_tool_use(fields, is_flat=True)
    template = template_of(tokenizer, with_tools=bool(tools.shown))
    conversation = Conversation(parse_input(fields), tools, parse_rendering(fields, template))
    options = replace(parse_response_options(fields, context.config.reuse, tokenizer), left_out=body.left_out)
    chat = await asyncio.to_thread(prepare_chat, tokenizer, context.config, conversation, options)
    documents = await asyncio.to_thread(chat_documents, fields, chat.prompt)
    chat = replace(chat, options=chat.options.with_fields(documents=documents))
    answer_id = access_of(request.scope).answer_id = _ID_PREFIX + uuid.uuid4().hex
    return ResponsesResponse(context, answer_id, chat, fields)


class ResponsesResponse(GenerationResponse):
    """An ASGI app that computes one response and sends it."""

    def __init__(self, context: ServerContext, answer_id: str, chat: PreparedChat, fields: Fields) -> None:
        """Take a request; `fields` are its body, and what `chat` was made of."""
        blame = partial(body_error, fields=fields, endpoint=Endpoint.RESPONSES)
        super().__init__(context, answer_id, ChatForm(), chat.options, [chat.prompt], blame=blame)
        self._reading = chat.reading
        self._said = _said(fields)

    def _answer(
        self, head: JSONObject, choices: Sequence[ChoiceRequest], texts: TokenTexts, echoes: Sequence[PromptEcho]
    ) -> ResponsesWriter:
        del echoes  # this endpoint has none
        reader = None if self._reading is None else self._reading.reader()
        return ResponsesWriter(head, self._form, choices, texts, self._options, said=self._said, reader=reader)


def _said(fields: Fields) -> JSONObject:
    """Return what a response repeats of its request."""
    tools = [{"parameters": None, "strict": False, **tool.values} for tool in fields.sections("tools")]
    values = fields.values | {"tools": tools}
    _require_repeatable(fields, values)
    text = values.get("text") or {}
    assert isinstance(text, dict)
    return {
        "instructions": values.get("instructions"),
        "max_output_tokens": values.get("max_output_tokens"),
        "metadata": values.get("metadata") or {},
        "parallel_tool_calls": fields.flag("parallel_tool_calls", default=True),
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None} | (fields.section("reasoning").values),
        "store": False,
        "temperature": fields.number("temperature", 1.0, 0, 2),
        "text": {"format": text.get("format") or {"type": "text"}},
        "tool_choice": values.get("tool_choice") or "auto",
        "tools": tools,
        "top_logprobs": 0,
        "top_p": fields.number("top_p", 1.0, 0, 1),
        "truncation": "disabled",
    }


def _require_repeatable(fields: Fields, said: JSONObject) -> None:
    """Refuse numbers such as 1e999 in what a response repeats as it came: they are read as infinity."""
    for name in _REPEATED:
        try:
            json_bytes(said.get(name))
        except ValueError as error:
            raise fields.error(name, "has a number beyond what 64 bits hold; write a smaller one") from error
