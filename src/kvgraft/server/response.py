"""Send the answer to a generation request: whole or as server-sent events. A client that leaves cancels the work."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, TypeVar

from kvgraft.server.access_log import access_of
from kvgraft.server.answer import Answer, AnswerForm, JSONObject
from kvgraft.server.errors import APIError, ClientDisconnectedError, as_api_error, unavailable
from kvgraft.server.generation import prepare_choices, run_choices
from kvgraft.server.json_io import json_bytes, json_response
from kvgraft.server.logprobs import TokenTexts

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from starlette.types import Receive, Scope, Send

    from kvgraft.server.context import ServerContext
    from kvgraft.server.generation import Choice
    from kvgraft.server.options import Options

T = TypeVar("T")
logger = logging.getLogger(__name__)

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies of the nginx family would hold events back
]


class GenerationResponse:
    """An ASGI app that computes one answer and sends it.

    A stream's status is sent with its first token, so that errors before it are plain HTTP errors; later ones are an event
    `data: {"error": ...}`, behind which the stream ends.
    """

    def __init__(
        self,
        context: ServerContext,
        answer_id: str,
        form: AnswerForm,
        options: Options,
        prompts: Sequence[str | list[int]],
        *,
        add_special_tokens: bool = True,
    ) -> None:
        self._context = context
        self._answer_id = answer_id
        self._form = form
        self._options = options
        self._prompts = prompts
        self._add_special_tokens = add_special_tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; raises what goes wrong before the response has begun."""
        if self._options.stream:
            await until_disconnect(receive, self._send_events(scope, send))
        else:
            whole = await until_disconnect(receive, self._whole(scope))
            await json_response(whole)(scope, receive, send)

    async def _whole(self, scope: Scope) -> dict[str, object]:
        choices, answer = await self._prepare()
        try:
            async with aclosing(run_choices(self._context.engine, choices)) as parts:
                return await answer.whole(parts)
        finally:
            access_of(scope).add_outputs(answer.outputs)

    async def _send_events(self, scope: Scope, send: Send) -> None:
        choices, answer = await self._prepare()
        events = EventSender(send)
        try:
            async with aclosing(run_choices(self._context.engine, choices)) as parts:
                async for chunk in answer.chunks(parts):
                    await events.send(json_bytes(chunk))
            await events.send(b"[DONE]")
        except Exception as error:
            if not events.started:
                raise
            failure = self._failure(error)
            access_of(scope).error = failure.message
            await events.send(json_bytes(failure.payload()))
        finally:
            access_of(scope).add_outputs(answer.outputs)
        await events.end()

    async def _prepare(self) -> tuple[list[Choice], Answer]:
        if self._context.draining:
            raise unavailable("the server is shutting down; send the request again")
        engine, options = self._context.engine, self._options
        choices = await prepare_choices(
            engine, self._prompts, options, self._answer_id, add_special_tokens=self._add_special_tokens
        )
        texts = TokenTexts(engine.loaded.tokenizer)
        head: JSONObject = {"id": self._answer_id, "created": int(time.time()), "model": self._context.model_id}
        return choices, Answer(head, self._form, choices, texts, include_usage=options.include_usage)

    def _failure(self, error: Exception) -> APIError:
        failure = as_api_error(error, closing=self._context.is_closing)
        if failure.code is None and failure.status >= 500:
            logger.error("stream of %s failed", self._answer_id, exc_info=error)
        return failure


class EventSender:
    """Sends server-sent events; the first one begins the response."""

    def __init__(self, send: Send) -> None:
        self.started = False
        self._send = send

    async def send(self, data: bytes) -> None:
        """Send `data` as one server-sent event, and the head of the response in front of the first."""
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": list(_STREAM_HEADERS)})
        await self._send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})

    async def end(self) -> None:
        """Tell the server that no event follows."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


async def until_disconnect(receive: Receive, work: Coroutine[object, object, T]) -> T:
    """Run `work` and return its result; cancels it if the client leaves first.

    Raises:
        ClientDisconnectedError: The client left.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnectedError
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
