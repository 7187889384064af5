"""Errors as OpenAI's clients expect them, and how kvgraft's own become such."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException

from kvgraft.errors import (
    ConfigError,
    ContextLengthError,
    OverloadedError,
    RequestError,
    SessionInUseError,
    UnknownSessionError,
    UnservableError,
)
from kvgraft.http.json_io import json_response

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.responses import Response

MESSAGES_PATH = "/v1/messages"
"""Of Anthropic's API, whose errors have a form of their own."""
_MESSAGES_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Types of its errors; others are the request's fault, or `api_error`."""
_CONTEXT_LENGTH = "context_length_exceeded"
_TOO_LONG = "prompt is too long: "
"""By these words clients of Anthropic's API, whose errors have no codes, know that a conversation is to be shortened."""
RETRY_AFTER_S = 1
"""Seconds of `Retry-After` of an overloaded server; a request takes about that long to leave the queue."""


class ClientDisconnectedError(Exception):
    """The client is gone; no answer can be sent."""


class APIError(Exception):
    """An answer that is an error.

    Attributes:
        status: HTTP status.
        message: What is wrong and what to do about it.
        kind: OpenAI's `type`.
        code: OpenAI's `code`, for programs.
        param: Name of the field that is wrong.
        headers: Further headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    def payload(self) -> dict[str, object]:
        """Return the body: `{"error": {...}}`."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self, path: str = "") -> Response:
        """Return it as an HTTP response, in the form of the endpoint at `path`."""
        is_message = path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")
        payload = messages_error(self.payload(), self.status) if is_message else self.payload()
        return json_response(payload, self.status, self.headers)


class BadRequestError(APIError):
    """The body cannot be used as it is."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(400, message, param=param, code=code)


def messages_error(payload: dict[str, object], status: int = 500) -> dict[str, object]:
    """Return the body of an error in the form of Anthropic's API, from that of OpenAI's."""
    error = payload["error"]
    assert isinstance(error, dict)
    kind = _MESSAGES_KINDS.get(status) or ("invalid_request_error" if status < 500 else "api_error")
    begin = _TOO_LONG if error["code"] == _CONTEXT_LENGTH else ""
    return {"type": "error", "error": {"type": kind, "message": f"{begin}{error['message']}"}}


def unavailable(message: str) -> APIError:
    """Return the error of a server that takes no more requests."""
    return APIError(
        503,
        message,
        kind="service_unavailable_error",
        code="unavailable",
        headers={"retry-after": str(RETRY_AFTER_S)},
    )


def as_api_error(error: Exception, *, closing: bool) -> APIError:  # noqa: PLR0911 - a line per kind of error
    """Translate any error; an unexpected one is a 500 that shows no internals.

    Args:
        error: What went wrong.
        closing: The server takes no more requests, so a refusal is final here.
    """
    match error:
        case APIError():
            return error
        case UnknownSessionError():
            return APIError(404, str(error), code="session_not_found", param="session_id")
        case SessionInUseError():
            return APIError(409, str(error), code="session_in_use", param="session_id")
        case ContextLengthError():
            return BadRequestError(str(error), error.argument, code=_CONTEXT_LENGTH)
        case ConfigError() | UnservableError():
            return BadRequestError(str(error), error.argument)
        case OverloadedError() | RequestError() if closing:
            return unavailable(str(error))
        case OverloadedError():
            headers = {"retry-after": str(RETRY_AFTER_S)}
            return APIError(429, str(error), kind="rate_limit_error", code="overloaded", headers=headers)
        case RequestError():
            return APIError(500, str(error), kind="server_error", code="engine_error")
        case HTTPException():
            return _of_http(error)
    return APIError(500, "internal error; the server's log has details under this request id", kind="server_error")


def _of_http(error: HTTPException) -> APIError:
    messages = {
        404: "there is no such endpoint; GET / lists them",
        405: "this endpoint does not take that method; GET / lists endpoints and methods",
    }
    codes = {404: "not_found", 405: "method_not_allowed"}
    return APIError(
        error.status_code,
        messages.get(error.status_code, error.detail),
        code=codes.get(error.status_code),
        headers=error.headers,
    )
