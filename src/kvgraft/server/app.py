"""The ASGI app: routes, middleware, errors."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route

from kvgraft.errors import KVGraftError
from kvgraft.server import status
from kvgraft.server.access_log import AccessLog, note_error
from kvgraft.server.auth import BearerAuth
from kvgraft.server.chat import create_chat_completion
from kvgraft.server.completions import create_completion
from kvgraft.server.context import ServerContext, context_of
from kvgraft.server.errors import APIError, as_api_error

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.requests import Request
    from starlette.responses import Response

    from kvgraft.config import ServerConfig
    from kvgraft.engine.async_llm import AsyncLLM
    from kvgraft.observability.prometheus import PrometheusRecorder


def create_app(engine: AsyncLLM, config: ServerConfig, metrics: PrometheusRecorder | None = None) -> Starlette:
    """Return the app over `engine`; it closes the engine when it is shut down.

    Args:
        engine: Computes requests.
        config: Settings; those of the engine are not read.
        metrics: The recorder that `engine` tells its records to, for `/metrics`; None leaves the endpoint out.
    """
    app = Starlette(
        routes=[
            Route("/", status.index),
            Route("/health", status.health),
            Route("/metrics", status.metrics),
            Route("/tokenize", status.tokenize, methods=["POST"]),
            Route("/reset_prefix_cache", status.reset_prefix_cache, methods=["POST"]),
            Route("/v1/models", status.list_models),
            Route("/v1/models/{id:path}", status.get_model),
            Route("/v1/completions", create_completion, methods=["POST"]),
            Route("/v1/chat/completions", create_chat_completion, methods=["POST"]),
        ],
        middleware=[Middleware(AccessLog, metrics), Middleware(BearerAuth, config.api_key)],
        exception_handlers={APIError: _answer_error, KVGraftError: _answer_error, HTTPException: _answer_error},
        lifespan=_lifespan,
    )
    app.router.redirect_slashes = False
    app.state.context = ServerContext(engine, config, metrics)
    return app


@asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncGenerator[None]:
    yield
    await app.state.context.close(0.0)


async def _answer_error(request: Request, error: Exception) -> Response:
    answer = as_api_error(error, closing=context_of(request).is_closing)
    note_error(request.scope, answer)
    return answer.response()
