"""Send the answer to a generation request: whole or as server-sent events. A client that leaves cancels the work."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing
from typing import TYPE_CHECKING

from kvgraft.errors import ConfigError, UnservableError
from kvgraft.http.access_log import access_of
from kvgraft.http.disconnect import until_disconnect
from kvgraft.http.errors import APIError, as_api_error, unavailable
from kvgraft.http.json_io import json_bytes, json_response
from kvgraft.observability.otel.exchange import AnswerAsked
from kvgraft.server.answer import AnswerForm, AnswerWriter, JSONObject
from kvgraft.server.echo import echo_of
from kvgraft.server.event_sender import EventSender
from kvgraft.server.generation import prepare_choices, run_choices
from kvgraft.server.logprobs import TokenIdTexts, TokenTexts
from kvgraft.types import ReuseMode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send

    from kvgraft.server.context import ServerContext
    from kvgraft.server.echo import PromptEcho
    from kvgraft.server.generation import ChoiceRequest
    from kvgraft.server.options import AnswerOptions

logger = logging.getLogger(__name__)


class GenerationResponse:
    """An ASGI app that computes one answer and sends it.

    A stream's status is sent with its first token, or with the first comment while the token is waited for, so that errors
    before it are plain HTTP errors; later ones are an event `data: {"error": ...}`, after which the stream ends.
    """

    def __init__(
        self,
        context: ServerContext,
        answer_id: str,
        form: AnswerForm,
        options: AnswerOptions,
        prompts: Sequence[str | list[int]],
        *,
        blame: Callable[[ConfigError | UnservableError], APIError],
    ) -> None:
        """Take a request.

        Args:
            context: The server.
            answer_id: Of the answer.
            form: How it looks.
            options: How to answer.
            prompts: Texts or token ids.
            blame: Names the field of the body that is meant where the engine refuses an argument.
        """
        self._context = context
        self._answer_id = answer_id
        self._form = form
        self._options = options
        self._prompts = prompts
        self._blame = blame

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """AnswerWriter; raises what goes wrong before the response has begun."""
        try:
            if self._options.stream:
                await until_disconnect(receive, self._send_events(scope, send))
            else:
                response = await until_disconnect(receive, self._whole(scope))
                await response(scope, receive, send)
        except (ConfigError, UnservableError) as error:
            raise self._blame(error) from error

    async def _whole(self, scope: Scope) -> Response:
        choices, answer = await self._prepare(scope)
        engine = self._context.engine
        try:
            async with aclosing(run_choices(engine, choices, share_prompts=self._shares(len(choices)))) as parts:
                whole = await answer.whole(parts)
            return json_response(whole, headers=answer.headers())
        finally:
            access_of(scope).add_outputs(answer.outputs)

    async def _send_events(self, scope: Scope, send: Send) -> None:
        choices, answer = await self._prepare(scope)
        events = EventSender(send, keep_alive_s=self._context.config.sse_keep_alive_interval)
        try:
            async with events.kept_alive():
                await self._send_answer(events, answer, choices, scope)
        finally:
            access_of(scope).add_outputs(answer.outputs)
        await events.end()

    async def _send_answer(
        self, events: EventSender, answer: AnswerWriter, choices: Sequence[ChoiceRequest], scope: Scope
    ) -> None:
        try:
            shares = self._shares(len(choices))
            running = run_choices(self._context.engine, choices, events.admit, share_prompts=shares)
            async with aclosing(running) as parts:
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

    def _shares(self, num_choices: int) -> bool:
        """Whether choices of a prompt find in the cache what the first computes, and there will be room for them then."""
        options, context = self._options, self._context
        has_room = context.engine.snapshot().num_waiting + num_choices <= context.config.max_waiting
        return options.request.reuse != ReuseMode.OFF and options.prompt_logprobs is None and has_room

    async def _prepare(self, scope: Scope) -> tuple[list[ChoiceRequest], AnswerWriter]:
        if self._context.draining:
            raise unavailable("the server is shutting down; send the request again")
        engine, options = self._context.engine, self._options
        choices = await prepare_choices(engine, self._prompts, options, self._answer_id)
        access_of(scope).asked = self._asked(choices)
        texts = (TokenIdTexts if options.tokens_as_ids else TokenTexts)(engine.loaded.tokenizer)
        head: JSONObject = {"id": self._answer_id, "created": int(time.time()), "model": self._context.model_id}
        return choices, self._answer(head, choices, texts, await self._echoes(choices))

    def _asked(self, choices: Sequence[ChoiceRequest]) -> AnswerAsked:
        options = self._options
        return AnswerAsked(
            answer_id=self._answer_id,
            choices=tuple((choice.request.request_id, choice.prompt_index) for choice in choices),
            reuse=str(options.request.reuse),
            max_tokens=options.sampling.max_new_tokens,
            temperature=options.sampling.temperature,
            top_p=options.sampling.top_p,
            stream=options.stream,
            has_output=not options.no_output,
        )

    def _answer(
        self, head: JSONObject, choices: Sequence[ChoiceRequest], texts: TokenTexts, echoes: Sequence[PromptEcho]
    ) -> AnswerWriter:
        return AnswerWriter(head, self._form, choices, texts, self._options, echoes=echoes)

    async def _echoes(self, choices: Sequence[ChoiceRequest]) -> list[PromptEcho]:
        """Return what each prompt's answers begin with; nothing unless it is asked for."""
        if not self._options.echo:
            return []
        tokenizer, special = self._context.engine.loaded.tokenizer, self._options.request.add_special_tokens
        token_ids = {choice.prompt_index: choice.request.token_ids for choice in choices}
        return [
            await asyncio.to_thread(echo_of, prompt, token_ids[index], tokenizer, add_special_tokens=special)
            for index, prompt in enumerate(self._prompts)
        ]

    def _failure(self, error: Exception) -> APIError:
        if isinstance(error, ConfigError | UnservableError):
            return self._blame(error)
        failure = as_api_error(error, closing=self._context.is_closing)
        if failure.code is None and failure.status >= 500:
            logger.error("stream of %s failed", self._answer_id, exc_info=error)
        return failure


def _event_name(event: JSONObject) -> str:
    """Events of a kind are named by it."""
    return str(event.get("type", ""))
