"""`POST /v1/completions`: continue one or several prompts."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvgraft.http.access_log import access_of
from kvgraft.http.body import read_object
from kvgraft.http.errors import BadRequestError
from kvgraft.http.fields import Fields
from kvgraft.server.aliases import AS_MANY_AS_FIT, with_our_names
from kvgraft.server.arguments import body_error
from kvgraft.server.body_fields import Endpoint
from kvgraft.server.completion_form import CompletionForm
from kvgraft.server.context import context_of
from kvgraft.server.document_fields import prompt_documents
from kvgraft.server.field_table import check_fields
from kvgraft.server.given_prompts import MAX_CHOICES, parse_prompts
from kvgraft.server.options import check_model, parse_options
from kvgraft.server.response import GenerationResponse
from kvgraft.server.sampling_fields import MAX_LOGPROBS
from kvgraft.server.sessions import parse_session

if TYPE_CHECKING:
    from starlette.requests import Request

    from kvgraft.server.context import ServerContext
    from kvgraft.server.options import AnswerOptions

_DEFAULT_TOKENS = 16
MAX_TOKENS = AS_MANY_AS_FIT


async def create_completion(request: Request) -> GenerationResponse:
    """Continue one or several prompts, given as text or as token ids."""
    context = context_of(request)
    fields = with_our_names(Fields(await read_object(request, context.config.max_body_bytes)))
    check_model(fields, context.model_id)
    check_fields(fields, Endpoint.COMPLETIONS)
    # Beside the event loop: a body has room for a million token ids.
    prompts = await asyncio.to_thread(parse_prompts, fields, context.engine.loaded.vocab_size)
    options = _options(fields, context)
    if fields.integer("best_of", options.n, 1, MAX_CHOICES) != options.n:
        raise fields.error(
            "best_of", "must be equal to n: choices are not ranked; ask for n choices, and take the best"
        )
    if len(prompts) * options.n > MAX_CHOICES:
        raise BadRequestError(f"prompts times n must be at most {MAX_CHOICES}; send several requests", param="n")
    session = parse_session(fields, request, append=True, num_choices=len(prompts) * options.n)
    if session and options.echo:
        raise fields.error("echo", "does not go with session_id: the prompt is all that the session holds")
    is_named = fields.section("kvgraft").has("documents")
    documents = await asyncio.to_thread(prompt_documents, fields, prompts) if is_named else ()
    special = fields.flag("add_special_tokens", default=True)
    form = CompletionForm()
    answer_id = access_of(request.scope).answer_id = form.id_prefix + uuid.uuid4().hex
    return GenerationResponse(
        context,
        answer_id,
        form,
        options.with_fields(add_special_tokens=special, documents=documents, **session),
        prompts,
        blame=partial(body_error, fields=fields, endpoint=Endpoint.COMPLETIONS),
    )


def _options(fields: Fields, context: ServerContext) -> AnswerOptions:
    """Read the options; what is asked about an echo, and an answer that has no output, is settled here."""
    echo = fields.flag("echo")
    max_tokens = fields.integer("max_tokens", _DEFAULT_TOKENS, 0, MAX_TOKENS)
    if max_tokens == 0 and not echo and not fields.has("prompt_logprobs"):
        raise fields.error("max_tokens", "must be at least 1, but for requests with echo or prompt_logprobs")
    options = parse_options(
        fields,
        max_tokens=max(1, max_tokens),
        logprobs=fields.integer("logprobs", 0, 0, MAX_LOGPROBS) if fields.has("logprobs") else None,
        default_reuse=context.config.reuse,
        tokenizer=context.engine.loaded.tokenizer,
    )
    sampling = options.sampling
    if echo and sampling.logprobs is not None:
        sampling = replace(sampling, prompt_logprobs=max(sampling.logprobs, sampling.prompt_logprobs or 0))
    return replace(options.with_sampling(sampling), echo=echo, no_output=max_tokens == 0)
