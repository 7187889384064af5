"""`POST /v1/completions`: continue one or several prompts."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from kvgraft.server.access_log import access_of
from kvgraft.server.answer import CompletionForm
from kvgraft.server.body import read_object
from kvgraft.server.context import context_of
from kvgraft.server.errors import BadRequestError
from kvgraft.server.fields import Fields, kind_of
from kvgraft.server.options import MAX_CHOICES, MAX_LOGPROBS, check_model, parse_options, refuse
from kvgraft.server.response import GenerationResponse

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request

_DEFAULT_TOKENS = 16
MAX_TOKENS = 2**31 - 1
"""Largest `max_tokens`; what does not fit behind the prompt is cut in any case."""
_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {"suffix": ("",), "best_of": (1,), "echo": (False,)}


async def create_completion(request: Request) -> GenerationResponse:
    """Continue one or several prompts, given as text or as token ids."""
    context = context_of(request)
    fields = Fields(await read_object(request, context.config.max_body_bytes))
    check_model(fields, context.model_id)
    refuse(fields, _UNSUPPORTED)
    prompts = parse_prompts(fields, context.engine.loaded.vocab_size)
    options = parse_options(
        fields,
        max_tokens=fields.integer("max_tokens", _DEFAULT_TOKENS, 1, MAX_TOKENS),
        logprobs=fields.integer("logprobs", 0, 0, MAX_LOGPROBS) if fields.has("logprobs") else None,
        default_reuse=context.config.reuse,
    )
    if len(prompts) * options.n > MAX_CHOICES:
        raise BadRequestError(f"prompts times n must be at most {MAX_CHOICES}; send several requests", param="n")
    form = CompletionForm()
    answer_id = access_of(request.scope).answer_id = form.id_prefix + uuid.uuid4().hex
    return GenerationResponse(context, answer_id, form, options, prompts)


def parse_prompts(fields: Fields, vocab_size: int) -> list[str | list[int]]:
    """Return the prompts of `prompt`: a string, a list of strings, token ids, or a list of token id lists."""
    prompt = fields.values.get("prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        problem = "is missing" if prompt is None else "is empty" if prompt == [] else f"must not be {kind_of(prompt)}"
        raise fields.error("prompt", f"{problem}; give a string, a list of strings, token ids or a list of those")
    if isinstance(prompt[0], int):
        return [_token_ids(fields, "prompt", prompt, vocab_size)]
    if len(prompt) > MAX_CHOICES:
        raise fields.error("prompt", f"must hold at most {MAX_CHOICES} prompts; send several requests")
    return [
        item if isinstance(item, str) else _token_ids(fields, f"prompt[{number}]", item, vocab_size)
        for number, item in enumerate(prompt)
    ]


def _token_ids(fields: Fields, key: str, value: object, vocab_size: int) -> list[int]:
    if not isinstance(value, list) or not value:
        raise fields.error(key, "must be a string or a list of token ids that is not empty")
    if not all(type(token) is int for token in value):
        raise fields.error(key, "must hold whole numbers only, or strings only")
    if min(value) < 0 or max(value) >= vocab_size:
        raise fields.error(key, f"has token ids outside [0, {vocab_size}); was it tokenised for another model?")
    return value
