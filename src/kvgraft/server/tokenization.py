"""`POST /tokenize`, `POST /detokenize`: what the model's tokenizer makes of a text, and of tokens; the forms are vLLM's."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvgraft.engine.requests.options import RequestOptions
from kvgraft.http.body import read_object
from kvgraft.http.errors import BadRequestError
from kvgraft.http.fields import Fields
from kvgraft.http.json_io import json_response
from kvgraft.server.aliases import with_our_names
from kvgraft.server.body_fields import Endpoint
from kvgraft.server.context import context_of
from kvgraft.server.conversation import rendering_of
from kvgraft.server.field_table import check_fields
from kvgraft.server.given_prompts import parse_prompts, parse_token_ids
from kvgraft.server.logprobs import TokenTexts
from kvgraft.server.options import check_model
from kvgraft.server.rendering import show_conversation
from kvgraft.server.served_fields import served_conversation

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from kvgraft.server.context import ServerContext


async def tokenize(request: Request) -> Response:
    """Return the token ids of one prompt or conversation, and their texts if they are asked for."""
    context = context_of(request)
    fields = Fields(await read_object(request, context.config.max_body_bytes))
    check_model(fields, context.model_id)
    prompt, special = await _prompt(context, fields)
    prepared = await context.engine.build(prompt, RequestOptions(reuse="off", add_special_tokens=special))
    tokens = [int(token) for token in prepared.token_ids]
    answer = {"count": len(tokens), "max_model_len": int(context.engine.max_model_len), "tokens": tokens}
    if fields.flag("return_token_strs"):
        texts = TokenTexts(context.engine.loaded.tokenizer)
        answer["token_strs"] = await asyncio.to_thread(lambda: [texts[token] for token in tokens])
    return json_response(answer)


async def _prompt(context: ServerContext, fields: Fields) -> tuple[str | list[int], bool]:
    """Return a prompt, and whether the tokenizer adds its own tokens: of a conversation what a chat would be answered for."""
    loaded = context.engine.loaded
    if fields.has("messages"):
        if fields.has("prompt"):
            raise fields.error("prompt", "is there beside messages; leave out one of them")
        read = served_conversation(context, with_our_names(fields), Endpoint.TOKENIZE)
        rendering = rendering_of(context.config)
        shown = await asyncio.to_thread(show_conversation, loaded.tokenizer, rendering, read.conversation)
        return shown.prompt.text, shown.prompt.add_special_tokens
    check_fields(fields, Endpoint.TOKENIZE)
    prompts = await asyncio.to_thread(parse_prompts, fields, loaded.vocab_size)
    if len(prompts) != 1:
        raise fields.error("prompt", "must be one prompt")
    return prompts[0], fields.flag("add_special_tokens", default=True)


async def detokenize(request: Request) -> Response:
    """Return the text of token ids, special tokens included."""
    context = context_of(request)
    fields = Fields(await read_object(request, context.config.max_body_bytes))
    check_model(fields, context.model_id)
    check_fields(fields, Endpoint.DETOKENIZE)
    tokenizer = context.engine.loaded.tokenizer
    if tokenizer is None:
        raise BadRequestError("this model has no tokenizer, so its tokens have no text", param="tokens")
    vocab_size, given = context.engine.loaded.vocab_size, fields.values.get("tokens")
    tokens = await asyncio.to_thread(parse_token_ids, fields, "tokens", given, vocab_size)
    return json_response({"prompt": str(await asyncio.to_thread(tokenizer.decode, tokens))})
