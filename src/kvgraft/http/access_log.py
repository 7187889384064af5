"""One log line per request: who asked what, what it cost, what was reused. Never prompts, answers or keys."""

from __future__ import annotations

import logging
import re
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvgraft.http.errors import APIError, ClientDisconnectedError, as_api_error
from kvgraft.observability.otel.exchange import Exchange

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from kvgraft.engine.requests.request import RequestOutput
    from kvgraft.observability.otel.exchange import AnswerAsked
    from kvgraft.observability.otel.tracing import RequestTraces
    from kvgraft.observability.prometheus import PrometheusRecorder

logger = logging.getLogger(__name__)

_KEY = "kvgraft.access"
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:\-]{1,128}")
_CLIENT_CLOSED = 499
"""Not sent: stands in logs and metrics for a client that left, as in nginx."""
_QUIET_PATHS = frozenset({"/health", "/metrics"})
_QUIET_BELOW = "/ui/"
"""The inspector's page asks every other second."""
_PARENTS = ("/v1/models", "/v1/sessions")
_PATHS = frozenset(
    {
        *("/", "/health", "/metrics", "/tokenize", "/detokenize", "/v1/completions", "/v1/chat/completions"),
        *("/v1/responses", "/v1/messages", "/v1/messages/count_tokens", *_PARENTS),
    }
)


_ANSWERS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"})
"""Paths with requests that are traced."""
_CLIENT_LEFT = "client_disconnected"


@dataclass(slots=True)
class AccessRecord:
    """Facts of a request for its log line; endpoints fill them in."""

    request_id: str
    method: str
    path: str
    started: float = field(default_factory=time.perf_counter)
    status: int | None = None
    answer_id: str | None = None
    error: str | None = None
    num_choices: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    exact_tokens: int = 0
    continued_tokens: int = 0
    shifted_tokens: int = 0
    drafted_tokens: int | None = None
    retracted_tokens: int | None = None
    ttft_ms: float | None = None
    finish: str | None = None
    error_kind: str | None = None
    asked: AnswerAsked | None = None

    def add_outputs(self, outputs: Sequence[RequestOutput]) -> None:
        """Take over what finished choices cost."""
        for output in outputs:
            self.num_choices += 1
            self.prompt_tokens += len(output.prompt_token_ids)
            self.output_tokens += len(output.token_ids)
            self.exact_tokens += int(output.report.exact_tokens)
            self.continued_tokens += int(output.report.continued_tokens)
            self.shifted_tokens += int(output.report.shifted_tokens)
            healing = output.report.healing
            if healing is not None:
                self.drafted_tokens = (self.drafted_tokens or 0) + int(healing.drafted_tokens)
                self.retracted_tokens = (self.retracted_tokens or 0) + int(healing.retracted_tokens)
            self.ttft_ms = max(self.ttft_ms or 0.0, output.ttft_s * 1e3)
            self.finish = str(output.finish_reason)

    def note_error(self, error: APIError) -> None:
        """Take over what went wrong: its message for the log, its kind for traces."""
        self.error, self.error_kind = error.message, error.code or error.kind

    def fields(self) -> dict[str, object]:
        """Return what is logged; None is left out."""
        tokens = (
            "prompt_tokens",
            "output_tokens",
            "exact_tokens",
            "continued_tokens",
            "shifted_tokens",
            "drafted_tokens",
            "retracted_tokens",
            "ttft_ms",
            "finish",
        )
        return {
            "request_id": self.request_id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "total_ms": (time.perf_counter() - self.started) * 1e3,
            "answer_id": self.answer_id,
            **({name: getattr(self, name) for name in tokens} if self.num_choices else {}),
            "error": self.error,
        }


def access_of(scope: Scope) -> AccessRecord:
    """Return the record of the request in `scope`."""
    record = scope[_KEY]
    assert isinstance(record, AccessRecord)
    return record


class AccessLog:
    """Middleware: gives each request an id, logs and counts its end, and turns uncaught errors into a 500."""

    def __init__(self, app: ASGIApp, metrics: PrometheusRecorder | None, traces: RequestTraces | None = None) -> None:
        self._app = app
        self._metrics = metrics
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and log it when its response has ended."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = scope[_KEY] = AccessRecord(_request_id(scope), scope["method"], scope["path"])
        id_header = (b"x-request-id", record.request_id.encode("ascii"))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), id_header]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnectedError:
            record.status = _CLIENT_CLOSED
        except Exception as error:
            record.error = record.error_kind = type(error).__name__
            logger.exception("request %s failed", record.request_id)
            if record.status is not None:
                raise  # the server closes the connection: the only way left to say so
            await as_api_error(error, closing=False).response(record.path)(scope, receive, send_with_id)
        finally:
            self._finish(record, scope)

    def _finish(self, record: AccessRecord, scope: Scope) -> None:
        status = record.status or _CLIENT_CLOSED
        if self._metrics is not None:
            self._metrics.record_response(_endpoint(record.path), status)
        if self._traces is not None and record.path in _ANSWERS:
            self._traces.record_exchange(_exchange(record, scope, status))
        quiet = (record.path in _QUIET_PATHS or record.path.startswith(_QUIET_BELOW)) and status < 400
        logger.log(logging.DEBUG if quiet else logging.INFO, "request", extra={"fields": record.fields()})


def note_error(scope: Scope, error: APIError) -> None:
    """Put an error's message into the log line."""
    access_of(scope).note_error(error)


def _exchange(record: AccessRecord, scope: Scope, status: int) -> Exchange:
    has_left = status == _CLIENT_CLOSED
    return Exchange(
        request_id=record.request_id,
        method=record.method,
        route=record.path,
        status=None if has_left else status,
        error=_CLIENT_LEFT if has_left else record.error_kind,
        started=record.started,
        ended=time.perf_counter(),
        traceparent=_header(scope, b"traceparent"),
        tracestate=_header(scope, b"tracestate"),
        asked=record.asked,
    )


def _header(scope: Scope, wanted: bytes) -> str:
    """Return a header's values, joined as those of one that is sent several times; empty if it is not there."""
    return ",".join(str(value, "latin-1") for name, value in scope["headers"] if name == wanted)


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return str(value, "ascii")
    return uuid.uuid4().hex


def _endpoint(path: str) -> str:
    """Name a path by its route, so that clients cannot make up label values."""
    if path in _PATHS:
        return path
    for parent in _PARENTS:
        if path.startswith(f"{parent}/"):
            return f"{parent}/{{id}}"
    return "other"
