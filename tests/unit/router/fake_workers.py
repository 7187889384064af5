"""Workers that do what a test says, and a router in front of them, all in one event loop and over real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import asynccontextmanager

import aiohttp
import uvicorn
from aiohttp import web

from kvgraft.router import Router, WorkerSpec
from kvgraft.router import monitor as monitor_module
from kvgraft.router.app import create_app
from kvgraft.router.context import RouterContext
from kvgraft.router.prompts import PromptReader

WAIT_S = 60.0


class Worker:
    """Answers as OpenAI's API does. What it is to do with a request is set by the test.

    Attributes:
        behaviour: `stream`, `whole`, `open` (a stream that waits to be released), `cut` (one that breaks off in the middle
            of an event), `hang` (no answer until it is released), `die` (closes the connection without a word), `busy` (503).
        seen: Bodies of the requests.
        tokens_of: What `/tokenize` makes of a body with a prompt or messages: tokens, or None for 404.
        left: Set when a client has left a request that hangs.
    """

    def __init__(self, name):
        self.name = name
        self.behaviour = "stream"
        self.healthy = True
        self.metrics = ""
        self.models = [{"id": "model"}]
        self.tokens_of = None
        self.seen, self.headers = [], []
        self.arrived, self.left = asyncio.Event(), asyncio.Event()
        self.release = asyncio.Event()
        self.port = 0

    async def start(self):
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._answer)
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_post("/v1/responses", self._answer)
        app.router.add_post("/tokenize", self._tokenize)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self):
        await self._runner.cleanup()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    async def _health(self, _request):
        return web.Response(status=200 if self.healthy else 503)

    async def _metrics(self, _request):
        return web.Response(text=self.metrics)

    async def _models(self, _request):
        return web.json_response({"object": "list", "data": self.models})

    async def _tokenize(self, request):
        body = await request.json()
        if "prompt" not in body and "messages" not in body:
            return await self._answer(request)
        tokens = None if self.tokens_of is None else self.tokens_of(body)
        return web.json_response({"tokens": tokens}, status=404 if tokens is None else 200)

    async def _answer(self, request):
        self.seen.append(await request.read())
        self.headers.append(request.headers)
        self.arrived.set()
        try:
            return await getattr(self, f"_{self.behaviour}")(request)
        except asyncio.CancelledError:
            self.left.set()
            raise

    async def _whole(self, _request):
        return web.json_response({"from": self.name}, headers={"x-own": "1"})

    async def _busy(self, _request):
        return web.json_response({"error": {"message": self.name}}, status=503)

    async def _die(self, request):
        request.transport.abort()
        return web.Response()

    async def _hang(self, _request):
        await self.release.wait()
        return web.json_response({"from": self.name})

    async def _stream(self, request, *, end=b"data: [DONE]\n\n", wait=False):
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for number in range(2):
            await response.write(b"data: " + json.dumps({"from": self.name, "n": number}).encode() + b"\n\n")
        if wait:
            await self.release.wait()
        await response.write(end)
        return response

    async def _open(self, request):
        return await self._stream(request, wait=True)

    async def _cut(self, request):
        response = await self._stream(request, end=b"data: {", wait=True)
        await asyncio.sleep(0)
        request.transport.close()
        return response


class Words:
    """A tokenizer: one token per word."""

    chat_template = None

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [sum(word.encode()) % 50_000 for word in text.split()]}


@asynccontextmanager
async def routed(*workers, gateway=None, specs=None, tokenizer=None, keep_alive_s=None, **options):
    """A router in front of started workers; yields an HTTP session with its URL as base, and the context."""
    specs = specs or [WorkerSpec(worker.url, name=worker.name) for worker in workers]
    router = Router(specs, **options)
    context = RouterContext(router, PromptReader(tokenizer or Words()), gateway, keep_alive_s=keep_alive_s)
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(create_app(context), log_config=None, lifespan="on", ws="none", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started:
            await asyncio.sleep(0.01)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{listener.getsockname()[1]}") as session:
            yield session, context
    finally:
        server.should_exit = True
        await task
        listener.close()
        router.close()


async def until(condition):
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


def run(test):
    """Run an async test with two workers, which are stopped at the end."""

    async def whole():
        workers = [Worker("one"), Worker("two")]
        for worker in workers:
            await worker.start()
        try:
            async with asyncio.timeout(WAIT_S):
                await test(*workers)
        finally:
            for worker in workers:
                worker.release.set()
                await worker.stop()

    asyncio.run(whole())


def often(monkeypatch):
    """Ask workers for their health all the time."""
    monkeypatch.setattr(monitor_module, "INTERVAL_S", 0.02)
