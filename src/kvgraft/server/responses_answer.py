"""Turn the parts of one answer into a response of `/v1/responses`: whole, or as its typed events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.engine.requests.request import FinishReason
from kvgraft.server.answer import reuse_of
from kvgraft.server.responses_events import ResponseItems
from kvgraft.server.single_answer import SingleAnswerWriter

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from kvgraft.engine.requests.request import RequestOutput, StreamPart
    from kvgraft.server.answer import AnswerForm, JSONObject
    from kvgraft.server.generation import ChoiceRequest
    from kvgraft.server.logprobs import TokenTexts
    from kvgraft.server.options import AnswerOptions
    from kvgraft.server.tools import OutputReader


class ResponsesWriter(SingleAnswerWriter):
    """Builds one response. Its events are numbered, and the last of them holds all of it."""

    def __init__(
        self,
        head: JSONObject,
        form: AnswerForm,
        choices: Sequence[ChoiceRequest],
        texts: TokenTexts,
        options: AnswerOptions,
        *,
        said: JSONObject,
        reader: OutputReader | None,
    ) -> None:
        """Begin a response.

        Args:
            head: Its id, when it was asked for, and the model.
            form: Of the prefix of its id.
            choices: The one choice that it has.
            texts: Of tokens.
            options: What the client asked for.
            said: What the request said, which responses repeat.
            reader: Finds calls of tools; None if there are no tools.
        """
        super().__init__(head, form, choices, texts, options, reader=reader)
        self._said = said
        self._items = ResponseItems()
        self._num_events = 0

    async def whole(self, parts: AsyncIterator[tuple[ChoiceRequest, StreamPart]]) -> JSONObject:
        """Wait for everything and return the response."""
        async for _, part in parts:
            self._items.take(self._read(part))
        return self._ended()[-1]["response"]  # type: ignore[return-value]

    async def chunks(self, parts: AsyncIterator[tuple[ChoiceRequest, StreamPart]]) -> AsyncIterator[JSONObject]:
        """Yield events as parts come; the first come with the first token."""
        async for _, part in parts:
            if not self._num_events:
                for kind in ("response.created", "response.in_progress"):
                    yield self._numbered({"type": kind, "response": self._response("in_progress")})
            for event in self._items.take(self._read(part)):
                yield self._numbered(event)
        for event in self._ended():
            yield self._numbered(event)

    def failed(self, payload: JSONObject) -> JSONObject:
        """Return the event `response.failed`."""
        error = payload["error"]
        assert isinstance(error, dict)
        details = {"code": "server_error", "message": error["message"]}
        return self._numbered({"type": "response.failed", "response": self._response("failed") | {"error": details}})

    def _ended(self) -> list[JSONObject]:
        """Events that end the response; the last holds all of it."""
        output = self._output
        is_whole = output is not None and output.finish_reason == FinishReason.STOP
        events = self._items.end(is_whole=is_whole)
        status = "completed" if is_whole else "incomplete"
        return [*events, {"type": f"response.{status}", "response": self._response(status)}]

    def _numbered(self, event: JSONObject) -> JSONObject:
        number, self._num_events = self._num_events, self._num_events + 1
        return event | {"sequence_number": number}

    @property
    def _output(self) -> RequestOutput | None:
        return self._states[0].output

    def _response(self, status: str) -> JSONObject:
        is_done = self._output is not None
        return {
            "id": self._head["id"],
            "object": "response",
            "created_at": self._head["created"],
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._head["model"],
            "output": [dict(item) for item in self._items.output],
            **self._said,
            "usage": self._usage() if is_done else None,
            "kvgraft": reuse_of(self._states[0], self._options.left_out),
        }

    def _usage(self) -> JSONObject:
        counts = self.usage()
        details = counts["prompt_tokens_details"]
        assert isinstance(details, dict)
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": details["cached_tokens"], "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counts["total_tokens"],
            "kvgraft": counts["kvgraft"],
        }
