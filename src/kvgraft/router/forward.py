"""A request and its worker: chosen, tried, tried once more elsewhere, and its answer passed on as it comes."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import TYPE_CHECKING

from kvgraft.errors import OverloadedError
from kvgraft.http.access_log import access_of
from kvgraft.http.disconnect import until_disconnect
from kvgraft.http.errors import APIError, unavailable
from kvgraft.http.json_io import json_bytes, parse_object
from kvgraft.router.core import NoWorkerError
from kvgraft.router.policy import Prompt
from kvgraft.router.prompts import UnreadReason
from kvgraft.router.upstream import KEEP_ALIVE, Answer, BrokenStreamError, UpstreamError, ask

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from starlette.types import Receive, Scope, Send

    from kvgraft.router.context import RouterContext
    from kvgraft.router.core import WorkerChoice
    from kvgraft.router.directory import WorkerScore

logger = logging.getLogger(__name__)

_TRIES = 2


class Visit:
    """A request at one worker: counted there while it lasts. A context manager.

    Attributes:
        outcome: What the metrics will say: `ok`, `error`, `failed`, `busy`, `broken`, or `left` if the client did.
    """

    def __init__(self, context: RouterContext, choice: WorkerChoice) -> None:
        self.outcome = "left"
        self._has_begun = False
        self._context = context
        self._worker = choice.worker
        self._prefill_tokens = choice.prefill_tokens

    def __enter__(self) -> Visit:
        """Count the request as sent."""
        self._request = self._worker.begin(self._prefill_tokens)
        self._started, self._number = time.perf_counter(), self._worker.num_sent
        self._was_alone = self._worker.num_in_flight == 1
        return self

    def __exit__(self, *_: object) -> None:
        """Count the request as answered, or given up."""
        self._worker.end(self._request)
        self._context.metrics.ended(self._worker.spec.name, self.outcome)

    def waits(self, give_up: Callable[[], None]) -> None:
        """Say how the wait for the worker is ended, should it vanish."""
        self._request.give_up = give_up

    def heard(self) -> None:
        """Note that something came from the worker."""
        self._request.heard_at = time.monotonic()

    def first_event(self) -> None:
        """Note the first token of a stream; its time is the speed of the worker, if it did nothing else.

        Later calls say nothing.
        """
        if self._has_begun:
            return
        self._has_begun = True
        is_alone = self._was_alone and self._worker.num_sent == self._number
        self._worker.first_token(self._request, time.perf_counter() - self._started if is_alone else None)


class ForwardedResponse:
    """An ASGI app that answers one request.

    A worker that fails before its first byte is replaced by another one, once. One that fails later ends its own
    streams with an event `data: {"error": ...}`. A client that leaves takes its request at the worker with it.
    """

    def __init__(self, context: RouterContext, path: str, body: bytes) -> None:
        self._context = context
        self._path = path
        self._body = body
        self._arrived = time.perf_counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; raises `APIError` for what goes wrong before the response has begun."""
        await until_disconnect(receive, self._answer(scope, send))

    async def _answer(self, scope: Scope, send: Send) -> None:
        prompt, scores = await self._looked_at()
        tried: list[str] = []
        while not await self._visited(self._chosen(prompt, scores, tried), tried, scope, send):
            self._context.metrics.retried(tried[-1])

    async def _visited(self, choice: WorkerChoice, tried: list[str], scope: Scope, send: Send) -> bool:
        """Send the request to a worker and pass its answer on; False if another one is to be tried."""
        name = choice.worker.spec.name
        tried.append(name)
        with Visit(self._context, choice) as visit:
            try:
                answer = await self._asked(choice, scope, visit)
            except UpstreamError as error:
                visit.outcome = "failed"
                logger.warning("worker %s failed before the first byte: %s", name, error)
                self._context.monitor.doubt(choice.worker, refused=error.refused and self._context.gateway is None)
                if self._may_try_another(tried):
                    return False
                raise APIError(
                    502, "the worker failed; send the request again", kind="server_error", code="worker_failed"
                ) from error
            visit.waits(answer.close)
            visit.heard()
            try:
                if answer.asks_to_retry and self._may_try_another(tried):
                    visit.outcome = "busy"
                    return False
                self._context.metrics.first_byte(time.perf_counter() - self._arrived)
                await self._pass_on(answer, visit, name, scope, send)
                visit.outcome = "ok" if answer.status < 500 else "error"
            except BrokenStreamError as error:
                visit.outcome = "broken"
                logger.warning("worker %s broke off in the middle of an answer: %s", name, error)
                self._context.monitor.doubt(choice.worker, refused=False)
            finally:
                answer.close()
        return True

    async def _looked_at(self) -> tuple[Prompt, Mapping[str, WorkerScore]]:
        """Tokenise and score, off the event loop, long bodies one by one; what cannot be read has no score."""
        context, started = self._context, time.perf_counter()
        prompt = await context.lanes.run(len(self._body), self._read)
        scores: Mapping[str, WorkerScore] = {}
        if prompt.token_ids is not None and context.router.wants_scores:
            score = partial(context.router.score, prompt.token_ids, prompt.scope, is_grafted=prompt.is_grafted)
            scores = await context.lanes.run(len(self._body), score)
        context.metrics.scored(time.perf_counter() - started)
        return prompt, scores

    def _read(self) -> Prompt:
        try:
            body = parse_object(self._body)
        except ValueError as error:  # the worker says what is wrong with it
            self._context.unread(UnreadReason.INVALID, str(error))
            return Prompt(None, self._context.router.scope_of("", ""), self._body)
        return self._context.prompt(self._path, body, self._body)

    def _chosen(self, prompt: Prompt, scores: Mapping[str, WorkerScore], tried: list[str]) -> WorkerChoice:
        try:
            choice = self._context.router.choose(prompt, scores, without=tried)
        except NoWorkerError as error:
            self._context.metrics.refused("no_worker")
            raise unavailable(str(error)) from error
        except OverloadedError as error:
            self._context.metrics.refused("full")
            raise unavailable(str(error)) from error
        self._context.metrics.chosen(choice)
        return choice

    def _may_try_another(self, tried: list[str]) -> bool:
        return self._context.gateway is None and len(tried) < _TRIES and self._context.router.has_room(without=tried)

    async def _asked(self, choice: WorkerChoice, scope: Scope, visit: Visit) -> Answer:
        spec, gateway = choice.worker.spec, self._context.gateway
        headers = [*scope["headers"]]
        if not any(name == b"x-request-id" for name, _ in headers):
            headers.append((b"x-request-id", access_of(scope).request_id.encode("ascii")))
        if gateway is not None:
            name = gateway.header.lower().encode("latin-1")
            headers = [header for header in headers if header[0] != name] + [(name, spec.label.encode("ascii"))]
        url = (spec.url if gateway is None else gateway.url) + self._path
        try:
            async with asyncio.timeout(None) as patience:
                visit.waits(lambda: patience.reschedule(asyncio.get_running_loop().time()))
                return await ask(self._context.session, url, headers, self._body, self._context.keep_alive_s)
        except TimeoutError as error:
            raise UpstreamError("it is down and says nothing") from error

    async def _pass_on(self, answer: Answer, visit: Visit, name: str, scope: Scope, send: Send) -> None:
        """Send head and body; of a stream that breaks off, an event that says so is the last.

        Another answer that breaks off is not ended: the server closes the connection then, which the client sees.
        """
        headers = [*answer.headers, (b"x-kvgraft-worker", name.encode("latin-1", "replace"))]
        if not answer.is_stream and answer.length is not None:
            headers.append((b"content-length", str(answer.length).encode()))
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        try:
            async for piece in answer.pieces(self._context.keep_alive_s):
                if piece is not KEEP_ALIVE:
                    visit.heard()
                    if answer.is_stream and b"data:" in piece:
                        visit.first_event()
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except BrokenStreamError:
            failure = APIError(
                502, "the worker failed in the middle of the answer", kind="server_error", code="worker_failed"
            )
            access_of(scope).error = failure.message
            if answer.is_stream:
                last = b"data: " + json_bytes(failure.payload()) + b"\n\n"
                await send({"type": "http.response.body", "body": last, "more_body": False})
            raise
        await send({"type": "http.response.body", "body": b"", "more_body": False})
