"""The router's ASGI app: OpenAI's paths, passed on, and its own: score, health, metrics."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import quote

import aiohttp
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.routing import Route
from yarl import URL

from kvgraft import __version__
from kvgraft.errors import KVGraftError
from kvgraft.http.access_log import AccessLog, note_error
from kvgraft.http.body import OneLength, read_body
from kvgraft.http.errors import APIError, BadRequestError, as_api_error, unavailable
from kvgraft.http.json_io import json_response, parse_object
from kvgraft.router.context import MAX_BODY_BYTES, RouterContext, context_of
from kvgraft.router.forward import ForwardedResponse
from kvgraft.router.prompts import CHAT_PATH, COMPLETION_PATH, MESSAGES_PATH, RESPONSES_PATH

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.requests import Request

    from kvgraft.router.policy import Prompt

ENDPOINTS = {
    "POST /v1/completions": "continue text or token ids, at the worker that is chosen",
    "POST /v1/chat/completions": "answer a conversation, at the worker that is chosen",
    "POST /v1/responses, /v1/messages": "the same in other forms; by least to do, where workers render these otherwise",
    "POST /tokenize and others": "passed on to the worker with least to do",
    "GET /v1/models": "what the workers serve",
    "POST /v1/score": "what each worker holds of a prompt",
    "GET /health": "which workers answer",
    "GET /metrics": "metrics in the Prometheus format",
}
PASSED_ON = (
    "/v1/responses/input_tokens",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/rerank",
    "/tokenize",
    "/detokenize",
)
"""Paths of engines that clients use; none that an operator alone should reach, such as those that empty a cache."""
_MODELS_PATIENCE_S = 10.0


def create_app(context: RouterContext) -> Starlette:
    """Return the app over `context`, which it starts and closes."""
    app = Starlette(
        routes=[
            Route("/", _index),
            Route("/health", _health),
            Route("/metrics", _metrics),
            Route("/v1/models", _list_models),
            Route("/v1/models/{id:path}", _list_models),
            Route("/v1/score", _score, methods=["POST"]),
            Route(COMPLETION_PATH, _forward, methods=["POST"]),
            *(
                Route(path, _forward, methods=["POST"])
                for path in (CHAT_PATH, RESPONSES_PATH, MESSAGES_PATH, *PASSED_ON)
            ),
        ],
        middleware=[Middleware(AccessLog, None), Middleware(OneLength)],
        exception_handlers={APIError: _answer_error, KVGraftError: _answer_error, HTTPException: _answer_error},
        lifespan=_lifespan,
    )
    app.router.redirect_slashes = False
    app.state.context = context
    return app


@asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncGenerator[None]:
    await app.state.context.start()
    yield
    await app.state.context.close(0.0)


async def _answer_error(request: Request, error: Exception) -> Response:
    answer = as_api_error(error, closing=context_of(request).draining)
    note_error(request.scope, answer)
    return answer.response()


async def _index(_request: Request) -> Response:
    return json_response({"name": "kvgraft router", "version": __version__, "endpoints": ENDPOINTS})


async def _forward(request: Request) -> ForwardedResponse:
    context = context_of(request)
    body = await read_body(request, MAX_BODY_BYTES)
    if context.draining:
        raise unavailable("the router is shutting down; send the request again")
    return ForwardedResponse(context, request.url.path, body)


async def _score(request: Request) -> Response:
    """Score a prompt of a completion or the messages of a chat; `cache_salt` and `model` give the scope."""
    context = context_of(request)
    raw = await read_body(request, MAX_BODY_BYTES)
    prompt = await context.lanes.run(len(raw), partial(_prompt_of, context, raw))
    if prompt.token_ids is None:
        raise BadRequestError("there is no prompt that can be tokenised here; give prompt or messages", param="prompt")
    score = partial(context.router.score, prompt.token_ids, prompt.scope, is_grafted=prompt.is_grafted)
    scores = await context.lanes.run(len(raw), score)
    workers = {
        name: {
            "url": load.spec.url,
            "up": load.is_up,
            "exact_tokens": scores[name].exact_tokens,
            "continued_tokens": scores[name].continued_tokens,
            "shifted_tokens": scores[name].shifted_tokens,
            "seconds_saved": scores[name].seconds_saved,
        }
        for name, load in context.router.loads.items()
    }
    return json_response({"num_tokens": len(prompt.token_ids), "workers": workers})


def _prompt_of(context: RouterContext, raw: bytes) -> Prompt:
    try:
        body = parse_object(raw)
    except ValueError as error:
        raise BadRequestError(str(error), code="invalid_json") from error
    return context.prompt(CHAT_PATH if "messages" in body else COMPLETION_PATH, body, b"")


async def _list_models(request: Request) -> Response:
    """Pass the question on to a worker that answers; all are taken to serve the same."""
    context = context_of(request)
    path = _models_path(request)
    headers = {"authorization": key} if (key := request.headers.get("authorization")) else {}
    timeout = aiohttp.ClientTimeout(total=_MODELS_PATIENCE_S)
    for load in context.router.loads.values():
        if load.is_up:
            try:
                async with context.session.get(
                    URL(load.spec.url + path, encoded=True), headers=headers, timeout=timeout, allow_redirects=False
                ) as answer:
                    return Response(await answer.read(), answer.status, media_type="application/json")
            except (aiohttp.ClientError, TimeoutError, OSError):
                context.monitor.doubt(load, refused=False)
    raise unavailable("no worker answers; try again later")


def _models_path(request: Request) -> str:
    """Return the path of the question, which no name of a model can lead elsewhere."""
    name = request.path_params.get("id")
    if name is None:
        return "/v1/models"
    if any(part in (".", "..") for part in name.split("/")):
        raise HTTPException(404)
    return "/v1/models/" + quote(name, safe="")


async def _health(request: Request) -> Response:
    """Return 200 if a worker answers, else 503, and who does in both cases."""
    context = context_of(request)
    loads = context.router.loads
    workers = {
        name: {"url": load.spec.url, "up": load.is_up, "in_flight": load.num_in_flight} for name, load in loads.items()
    }
    status = (
        "shutting_down" if context.draining else "ok" if any(load.is_up for load in loads.values()) else "no_worker"
    )
    facts = {"status": status, "version": __version__, "policy": context.router.policy_name, "workers": workers}
    return json_response(facts, 200 if status == "ok" else 503)


async def _metrics(request: Request) -> Response:
    text = context_of(request).metrics.exposition()
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
