"""Turn the parts of one answer into a message of Anthropic's API: whole, or as its events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.engine.requests.request import FinishReason
from kvgraft.http.errors import messages_error
from kvgraft.server.answer import reuse_of
from kvgraft.server.message_blocks import MessageBlocks
from kvgraft.server.single_answer import SingleAnswerWriter

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from kvgraft.engine.requests.request import StreamPart
    from kvgraft.server.answer import AnswerForm, JSONObject
    from kvgraft.server.generation import ChoiceRequest
    from kvgraft.server.logprobs import TokenTexts
    from kvgraft.server.options import AnswerOptions
    from kvgraft.server.tools import OutputReader


class MessagesWriter(SingleAnswerWriter):
    """Builds one message, or the events of one."""

    def __init__(
        self,
        head: JSONObject,
        form: AnswerForm,
        choices: Sequence[ChoiceRequest],
        texts: TokenTexts,
        options: AnswerOptions,
        *,
        stops: Sequence[str],
        reader: OutputReader | None,
    ) -> None:
        """Begin a message.

        Args:
            head: Its id, when it was asked for, and the model.
            form: Of the prefix of its id.
            choices: The one choice that it has.
            texts: Of tokens.
            options: What the client asked for; where there are stops, they stand at the end of the text.
            stops: The client's own texts that end it, which the answer names and does not have.
            reader: Finds calls of tools; None if there are no tools.
        """
        super().__init__(head, form, choices, texts, options, reader=reader)
        self._stops = stops
        self._stopped_by: str | None = None
        self._blocks = MessageBlocks()

    async def whole(self, parts: AsyncIterator[tuple[ChoiceRequest, StreamPart]]) -> JSONObject:
        """Wait for everything and return the message."""
        async for _, part in parts:
            self._blocks.take(self._read(part))
        self._blocks.end()
        return self._message() | {**self._ended(), "usage": self._tokens(), "kvgraft": self._reuse()}

    async def chunks(self, parts: AsyncIterator[tuple[ChoiceRequest, StreamPart]]) -> AsyncIterator[JSONObject]:
        """Yield events as parts come; the first comes with the first token."""
        begun = False
        async for _, part in parts:
            events = self._blocks.take(self._read(part))
            if not begun:
                begun = True
                yield {"type": "message_start", "message": self._message() | {"content": [], "usage": self._tokens()}}
            for event in events:
                yield event
        for event in self._blocks.end():
            yield event
        ended = {"delta": self._ended(), "usage": self._tokens(), "kvgraft": self._reuse()}
        yield {"type": "message_delta", **ended}
        yield {"type": "message_stop"}

    def failed(self, payload: JSONObject) -> JSONObject:
        """Return the event `error`."""
        return messages_error(payload)

    def _text_of(self, part: StreamPart) -> str:
        return part.text if part.output is None else self._without_stop(part.text)

    def _without_stop(self, text: str) -> str:
        """Cut off what ended the text: it is held back until it is whole, so the last part has all of it."""
        sampling = self._options.sampling
        if not sampling.include_stop:
            return text
        ends = [stop for stop in sampling.stop if text.endswith(stop)]
        if not ends:
            return text
        stop = max(ends, key=len)
        self._stopped_by = stop if stop in self._stops else None
        return text.removesuffix(stop)

    def _message(self) -> JSONObject:
        return {
            "id": self._head["id"],
            "type": "message",
            "role": "assistant",
            "model": self._head["model"],
            "content": self._blocks.content,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _ended(self) -> JSONObject:
        output = self._states[0].output
        if output is None or output.finish_reason != FinishReason.STOP:
            reason = "max_tokens"
        elif self._blocks.has_calls:
            reason = "tool_use"
        else:
            reason = "end_turn" if self._stopped_by is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": self._stopped_by}

    def _tokens(self) -> JSONObject:
        """Count tokens; those of the prompt that were not computed are no input tokens here. Known at the end alone."""
        state = self._states[0]
        num_prompt = len((state.prompt or state.choice.request).token_ids)
        cached = 0 if state.output is None else int(state.output.report.reused_tokens)
        return {
            "input_tokens": num_prompt - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": state.num_tokens if state.output is None else len(state.output.token_ids),
        }

    def _reuse(self) -> JSONObject | None:
        return reuse_of(self._states[0], self._options.left_out)
