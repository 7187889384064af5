"""`POST /v1/responses`: OpenAI's newer form of a chat. Nothing is stored: a request brings the whole conversation."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvgraft.http.access_log import access_of
from kvgraft.http.body import read_object
from kvgraft.http.fields import Fields
from kvgraft.http.json_io import json_bytes, json_response
from kvgraft.server.arguments import body_error
from kvgraft.server.body_fields import Endpoint
from kvgraft.server.chat_form import ChatForm
from kvgraft.server.completions import MAX_TOKENS
from kvgraft.server.context import context_of
from kvgraft.server.conversation import prepare_chat
from kvgraft.server.counting import counted
from kvgraft.server.document_fields import chat_documents
from kvgraft.server.options import check_model, parse_options
from kvgraft.server.response import GenerationResponse
from kvgraft.server.responses_answer import ResponsesWriter
from kvgraft.server.served_fields import served_conversation
from kvgraft.server.structure_fields import structure_of_format

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request
    from starlette.responses import Response
    from transformers import PreTrainedTokenizerBase

    from kvgraft.server.answer import JSONObject
    from kvgraft.server.context import ServerContext
    from kvgraft.server.conversation import PreparedChat
    from kvgraft.server.echo import PromptEcho
    from kvgraft.server.generation import ChoiceRequest
    from kvgraft.server.logprobs import TokenTexts
    from kvgraft.server.options import AnswerOptions

_ID_PREFIX = "resp_"
_TEXT_KEYS = frozenset({"format", "verbosity"})
_REPEATED = ("metadata", "reasoning", "text", "tool_choice", "tools")
"""Fields with values of any depth that stand in responses."""


async def create_response(request: Request) -> GenerationResponse:
    """Answer a conversation of items, whole or in typed events."""
    context = context_of(request)
    fields, chat = await _prepared(Fields(await read_object(request, context.config.max_body_bytes)), context)
    documents = await asyncio.to_thread(chat_documents, fields, chat.prompt)
    chat = replace(chat, options=chat.options.with_fields(documents=documents))
    answer_id = access_of(request.scope).answer_id = _ID_PREFIX + uuid.uuid4().hex
    return ResponsesResponse(context, answer_id, chat, fields)


async def count_input_tokens(request: Request) -> Response:
    """Return how many tokens the prompt of a conversation has; nothing is computed."""
    context = context_of(request)

    async def prepare(fields: Fields) -> PreparedChat:
        return (await _prepared(fields, context))[1]

    return json_response({"object": "response.input_tokens", **await counted(request, context, prepare)})


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


async def _prepared(fields: Fields, context: ServerContext) -> tuple[Fields, PreparedChat]:
    """Read a body and render its conversation; returns the body as it is served, too."""
    check_model(fields, context.model_id)
    read = served_conversation(context, fields, Endpoint.RESPONSES)
    tokenizer = context.engine.loaded.tokenizer
    options = replace(_options(read.fields, context.config.reuse, tokenizer), left_out=read.left_out)
    return read.fields, await asyncio.to_thread(prepare_chat, tokenizer, context.config, read.conversation, options)


def _options(fields: Fields, default_reuse: str, tokenizer: PreTrainedTokenizerBase | None) -> AnswerOptions:
    """Read how to answer; raises `APIError` naming the field that is wrong."""
    options = parse_options(
        fields,
        max_tokens=fields.integer("max_output_tokens", MAX_TOKENS, 1, MAX_TOKENS),
        logprobs=None,
        default_reuse=default_reuse,
        tokenizer=tokenizer,
    )
    if options.request.provisional:
        raise fields.section("kvgraft").error("provisional", "has no events in /v1/responses; use /v1/chat/completions")
    text = fields.section("text", known=_TEXT_KEYS)
    text.text("verbosity")
    structure = structure_of_format(text.section("format")) if text.has("format") else None
    if structure is None:
        return options
    if options.sampling.structure is not None:
        raise text.error("format", "says what structured_outputs says, too; leave out one of them")
    return options.with_sampling(replace(options.sampling, structure=structure))


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
