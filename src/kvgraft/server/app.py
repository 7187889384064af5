"""The ASGI app: routes, middleware, errors."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import RedirectResponse
from starlette.routing import Mount, Route

from kvgraft.config import page_key
from kvgraft.errors import KVGraftError
from kvgraft.http.access_log import AccessLog, note_error
from kvgraft.http.auth import UI_PATH, BearerAuth
from kvgraft.http.body import OneLength
from kvgraft.http.errors import APIError, as_api_error
from kvgraft.http.origin_form import OriginForm
from kvgraft.http.web_pages import APICORS, KnownPages
from kvgraft.inspector import EngineSource, create_inspector, followed
from kvgraft.server import status, tokenization
from kvgraft.server.absent import absent_endpoint
from kvgraft.server.chat import create_chat_completion
from kvgraft.server.completions import create_completion
from kvgraft.server.context import ServerContext, context_of
from kvgraft.server.messages import count_tokens, create_message
from kvgraft.server.responses import count_input_tokens, create_response
from kvgraft.server.reuse_summary import REPORT_HEADER
from kvgraft.server.sessions import close_session, open_session

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute

    from kvgraft.config import ServerConfig
    from kvgraft.engine.async_llm import AsyncLLM
    from kvgraft.inspector import RequestHistory
    from kvgraft.observability.otel.tracing import RequestTraces
    from kvgraft.observability.prometheus import PrometheusRecorder

_NOT_FOUND = 404


def create_app(
    engine: AsyncLLM,
    config: ServerConfig,
    metrics: PrometheusRecorder | None = None,
    traces: RequestTraces | None = None,
    history: RequestHistory | None = None,
) -> Starlette:
    """Return the app over `engine`; it closes the engine when it is shut down.

    Args:
        engine: Computes requests.
        config: Settings; those of the engine are not read.
        metrics: The recorder of `engine`, for `/metrics`; None leaves the endpoint out.
        traces: The recorder that makes spans of what `engine` records; None makes none. The caller closes it.
        history: The recorder that keeps requests for the page at `/ui/`; None leaves the page out.

    Raises:
        ConfigError: There are several API keys and none for the page, which shows requests of all of them.
    """
    context = ServerContext(engine, config, metrics)
    source = None if history is None else _source(context, history)
    app = Starlette(
        routes=[
            Route("/", status.index),
            Route("/health", status.health),
            Route("/metrics", status.metrics),
            Route("/tokenize", tokenization.tokenize, methods=["POST"]),
            Route("/detokenize", tokenization.detokenize, methods=["POST"]),
            Route("/reset_prefix_cache", status.reset_prefix_cache, methods=["POST"]),
            Route("/v1/models", status.list_models),
            Route("/v1/models/{id:path}", status.get_model),
            Route("/v1/sessions", open_session, methods=["POST"]),
            Route("/v1/sessions/{id}", close_session, methods=["DELETE"]),
            Route("/v1/completions", create_completion, methods=["POST"]),
            Route("/v1/chat/completions", create_chat_completion, methods=["POST"]),
            Route("/v1/responses", create_response, methods=["POST"]),
            Route("/v1/responses/input_tokens", count_input_tokens, methods=["POST"]),
            Route("/v1/messages", create_message, methods=["POST"]),
            Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
            *([] if source is None else _inspector(source, config)),
        ],
        middleware=_middleware(config, metrics, traces),
        exception_handlers={APIError: _answer_error, KVGraftError: _answer_error, HTTPException: _answer_error},
        lifespan=partial(_lifespan, source=source),
    )
    app.router.redirect_slashes = False
    app.state.context = context
    return app


@asynccontextmanager
async def _lifespan(app: Starlette, source: EngineSource | None) -> AsyncGenerator[None]:
    async with followed(source):
        yield
    await app.state.context.close(0.0)


def _source(context: ServerContext, history: RequestHistory) -> EngineSource:
    samples = partial(status.samples, context)
    return EngineSource(context.model_id, context.engine, history, samples, lambda: context.is_closing)


def _inspector(source: EngineSource, config: ServerConfig) -> list[BaseRoute]:
    page = create_inspector(source, page_key(config))
    return [Route(UI_PATH, lambda _: RedirectResponse("ui/")), Mount(UI_PATH, page)]


def _middleware(
    config: ServerConfig, metrics: PrometheusRecorder | None, traces: RequestTraces | None
) -> list[Middleware]:
    """The outermost first: browsers are to read errors, too, and their preflights carry no key."""
    who = (
        Middleware(BearerAuth, config.api_key)
        if config.api_key
        else Middleware(KnownPages, config.host, config.cors_origin)
    )
    inner = [Middleware(OriginForm), Middleware(AccessLog, metrics, traces), Middleware(OneLength), who]
    if not config.cors_origin:
        return inner
    cors = Middleware(
        APICORS,
        allow_origins=config.cors_origin,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["x-request-id", REPORT_HEADER, "retry-after"],
    )
    return [cors, *inner]


async def _answer_error(request: Request, error: Exception) -> Response:
    absent = absent_endpoint(request.url.path) if getattr(error, "status_code", None) == _NOT_FOUND else None
    answer = absent or as_api_error(error, closing=context_of(request).is_closing)
    note_error(request.scope, answer)
    return answer.response(request.url.path)
