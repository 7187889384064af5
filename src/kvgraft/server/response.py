"""Send the answer to a generation request: whole or as server-sent events. A client that leaves cancels the work."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing
from typing import TYPE_CHECKING

from kvgraft.errors import ConfigError
from kvgraft.observability.otel.exchange import AnswerAsked
from kvgraft.server.access_log import access_of
from kvgraft.server.answer import Answer, AnswerForm, Extras, JSONObject
from kvgraft.server.disconnect import until_disconnect
from kvgraft.server.echo import echo_of
from kvgraft.server.errors import APIError, as_api_error, unavailable
from kvgraft.server.generation import prepare_choices, run_choices
from kvgraft.server.json_io import json_bytes, json_response
from kvgraft.server.logprobs import TokenIdTexts, TokenTexts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send

    from kvgraft.engine.document_names import DocumentLabel
    from kvgraft.server.context import ServerContext
    from kvgraft.server.generation import Choice
    from kvgraft.server.options import Options
    from kvgraft.server.sessions import SessionFields

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
        blame: Callable[[ConfigError], APIError],
        add_special_tokens: bool = True,
        session: SessionFields | None = None,
        documents: Sequence[DocumentLabel] = (),
    ) -> None:
        """Take a request.

        Args:
            context: The server.
            answer_id: Of the answer.
            form: How it looks.
            options: How to answer.
            prompts: Texts or token ids.
            blame: Says which field of the body is meant where the engine refuses an argument.
            add_special_tokens: Whether the tokenizer adds its own.
            session: The session that this is a turn of, or None.
            documents: What parts of the prompt are called.
        """
        self._context = context
        self._answer_id = answer_id
        self._form = form
        self._options = options
        self._prompts = prompts
        self._blame = blame
        self._add_special_tokens = add_special_tokens
        self._session = session
        self._documents = documents

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; raises what goes wrong before the response has begun."""
        try:
            if self._options.stream:
                await until_disconnect(receive, self._send_events(scope, send))
            else:
                response = await until_disconnect(receive, self._whole(scope))
                await response(scope, receive, send)
        except ConfigError as error:
            raise self._blame(error) from error

    async def _whole(self, scope: Scope) -> Response:
        choices, answer = await self._prepare(scope)
        try:
            async with aclosing(run_choices(self._context.engine, choices)) as parts:
                whole = await answer.whole(parts)
            return json_response(whole, headers=answer.headers())
        finally:
            access_of(scope).add_outputs(answer.outputs)

    async def _send_events(self, scope: Scope, send: Send) -> None:
        choices, answer = await self._prepare(scope)
        events = EventSender(send)
        try:
            async with aclosing(run_choices(self._context.engine, choices)) as parts:
                async for chunk in answer.chunks(parts):
                    await events.send(json_bytes(chunk), _event_name(chunk))
            if answer.end:
                await events.send(answer.end)
        except Exception as error:
            if not events.started:
                raise
            failure = self._failure(error)
            access_of(scope).note_error(failure)
            failed = answer.failed(failure.payload())
            await events.send(json_bytes(failed), _event_name(failed))
        finally:
            access_of(scope).add_outputs(answer.outputs)
        await events.end()

    async def _prepare(self, scope: Scope) -> tuple[list[Choice], Answer]:
        if self._context.draining:
            raise unavailable("the server is shutting down; send the request again")
        engine, options = self._context.engine, self._options
        choices = await prepare_choices(
            engine,
            self._prompts,
            options,
            self._answer_id,
            add_special_tokens=self._add_special_tokens,
            session=self._session,
            documents=self._documents,
        )
        access_of(scope).asked = self._asked(choices)
        texts = (TokenIdTexts if options.tokens_as_ids else TokenTexts)(engine.loaded.tokenizer)
        head: JSONObject = {"id": self._answer_id, "created": int(time.time()), "model": self._context.model_id}
        return choices, self._answer(head, choices, texts, await self._extras(choices))

    def _asked(self, choices: Sequence[Choice]) -> AnswerAsked:
        options = self._options
        return AnswerAsked(
            answer_id=self._answer_id,
            choices=tuple((choice.request.request_id, choice.prompt_index) for choice in choices),
            reuse=options.reuse,
            max_tokens=options.sampling.max_new_tokens,
            temperature=options.sampling.temperature,
            top_p=options.sampling.top_p,
            stream=options.stream,
            has_output=not options.no_output,
        )

    def _answer(self, head: JSONObject, choices: Sequence[Choice], texts: TokenTexts, extras: Extras) -> Answer:
        usage = self._options.include_usage
        return Answer(head, self._form, choices, texts, include_usage=usage, extras=extras)

    async def _extras(self, choices: Sequence[Choice]) -> Extras:
        options, echoes = self._options, []
        if options.echo:
            tokenizer, special = self._context.engine.loaded.tokenizer, self._add_special_tokens
            token_ids = {choice.prompt_index: choice.request.token_ids for choice in choices}
            for index, prompt in enumerate(self._prompts):
                echo = asyncio.to_thread(echo_of, prompt, token_ids[index], tokenizer, add_special_tokens=special)
                echoes.append(await echo)
        return Extras(
            echoes=echoes,
            prompt_logprobs=options.prompt_logprobs,
            token_ids=options.return_token_ids,
            no_output=options.no_output,
            continuous_usage=options.continuous_usage,
            skip_special_tokens=options.sampling.skip_special_tokens,
        )

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

    async def send(self, data: bytes, name: str = "") -> None:
        """Send `data` as one server-sent event, and the head of the response in front of the first.

        Args:
            data: One line.
            name: Of the event, if it has one.
        """
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": list(_STREAM_HEADERS)})
        head = f"event: {name}\n".encode() if name else b""
        await self._send({"type": "http.response.body", "body": head + b"data: " + data + b"\n\n", "more_body": True})

    async def end(self) -> None:
        """Tell the server that no event follows."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


def _event_name(event: JSONObject) -> str:
    """Events of a kind are named by it."""
    return str(event.get("type", ""))
