"""State that all endpoints share: the engine, the settings, the state of the server."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kvgraft.http.left_out import LeftOutLog
from kvgraft.server.health import HealthMonitor

if TYPE_CHECKING:
    from starlette.requests import Request

    from kvgraft.config import ServerConfig
    from kvgraft.engine.async_llm import AsyncLLM
    from kvgraft.observability.prometheus import PrometheusRecorder


class ServerContext:
    """One server over one engine; lives on the event loop.

    Attributes:
        engine: Computes requests.
        config: Settings.
        metrics: Where responses are counted; None counts nothing.
        model_id: Name of the model in the API.
        created: Unix time of the start, in seconds.
        draining: No more requests are taken.
        health: Knows how the engine is.
        left_out: Logs what clients send that is not served.
    """

    def __init__(self, engine: AsyncLLM, config: ServerConfig, metrics: PrometheusRecorder | None) -> None:
        self.engine = engine
        self.config = config
        self.metrics = metrics
        self.model_id = config.served_model_name or model_id(engine.loaded.name)
        self.created = int(time.time())
        self.draining = False
        self.health = HealthMonitor(self)
        self.left_out = LeftOutLog()
        self._closing: asyncio.Task[None] | None = None

    @property
    def is_closing(self) -> bool:
        """Return whether requests are refused from now on: the server is being stopped, or its engine has died."""
        return self.draining or self.engine.snapshot().is_closing

    async def close(self, grace_s: float) -> None:
        """Take no more requests, let running ones go on for `grace_s`, stop the engine. Later calls wait for the first."""
        self.draining = True
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self.engine.close(grace_s))
        await asyncio.shield(self._closing)


def context_of(request: Request) -> ServerContext:
    """Return the context of the app that handles `request`."""
    context = request.app.state.context
    assert isinstance(context, ServerContext)
    return context


def model_id(name: str) -> str:
    """Name a model for the API: a directory or file by its last part, so that clients do not learn where it lies."""
    path = Path(name).expanduser()
    if path.is_file():
        return path.stem
    return path.resolve().name if path.is_dir() else name
