"""A completions server without a model, for tests of the load client: says what it is told, one request at a time."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import dataclass, field

import pytest
from aiohttp import web
from tests.unit.bench.simulation import SimulatedServer, run_in_simulated_time

PATIENCE_S = 60
"""Longest wait for what happens at once on a machine that is not very busy."""


@dataclass
class FakeServer:
    """Computes one prompt at a time for `prefill_s`, as a machine would, then streams `tokens`.

    `status`, `cut_after` and `error_after` (tokens) make it fail; `piece` is the size of the pieces that it writes.
    """

    prefill_s: float = 0.0
    tokens: tuple[str, ...] = (" a", " b", " c")
    token_s: float = 0.0
    status: int = 200
    cut_after: int | None = None
    error_after: int | None = None
    piece: int | None = None
    report: dict[str, int] | None = None
    models: tuple[dict[str, object], ...] = ({"id": "fake", "max_model_len": 1_000},)
    url: str = ""
    bodies: list[dict[str, object]] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)
    """A client went away before its answer was complete."""

    def start(self) -> None:
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)), daemon=True)
        self._thread.start()
        assert ready.wait(PATIENCE_S)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(PATIENCE_S)

    async def _serve(self, ready: threading.Event) -> None:
        self._loop, self._ended, self._machine = asyncio.get_running_loop(), asyncio.Event(), asyncio.Lock()
        app = web.Application()
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        await self._ended.wait()
        await runner.cleanup()

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": list(self.models)})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status)
        try:
            async with self._machine:
                await asyncio.sleep(self.prefill_s)
            if not body.get("stream"):
                return web.json_response(self._last())
            return await self._stream(request)
        except (asyncio.CancelledError, ConnectionError):
            self.left.set()
            raise

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number, token in enumerate(self.tokens):
            if number == self.error_after:
                await self._write(response, {"error": {"message": "engine failed"}})
                return response
            if number == self.cut_after:
                return response
            await self._write(response, {"choices": [{"text": token}], "usage": None})
            await asyncio.sleep(self.token_s)
        await self._write(response, self._last())
        await self._write(response, "[DONE]")
        return response

    def _last(self) -> dict[str, object]:
        usage = {
            "prompt_tokens": 10,
            "completion_tokens": len(self.tokens),
            "prompt_tokens_details": {"cached_tokens": 4},
        }
        report = {} if self.report is None else {"kvgraft": self.report}
        return {"choices": [], "usage": usage, **report}

    async def _write(self, response: web.StreamResponse, value: object) -> None:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        data = f"data: {text}\n\n".encode()
        size = self.piece or len(data)
        for start in range(0, len(data), size):
            await response.write(data[start : start + size])
            if self.piece:
                await asyncio.sleep(0)


@pytest.fixture
def fake():
    """A running server; tests set its attributes."""
    server = FakeServer()
    server.start()
    yield server
    server.stop()


@pytest.fixture
def simulated(monkeypatch):
    """A simulated server that `kvgraft.bench.serve` talks to, in simulated time; tests set its attributes."""
    server = SimulatedServer()
    monkeypatch.setattr("kvgraft.bench.serve.CompletionsClient", lambda *_: server)
    monkeypatch.setattr("kvgraft.bench.serve.asyncio.run", run_in_simulated_time)
    return server
