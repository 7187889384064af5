"""Chat answers in OpenAI's form: `chat.completion` and its chunks, with calls of tools."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.engine.requests.request import FinishReason
from kvgraft.server.answer import AnswerForm, ChoiceState, JSONObject
from kvgraft.server.logprobs import chat_logprobs
from kvgraft.server.tools import CallArguments, CallBegin, Content

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgraft.engine.sampling.sampling import TokenLogprobs
    from kvgraft.server.logprobs import TokenTexts
    from kvgraft.server.tools import OutputReader, Piece, ToolCall, ToolReading


class ChatForm(AnswerForm):
    """OpenAI's `chat.completion`, and its chunks."""

    id_prefix, object_name, chunk_name = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    scores_end = False

    def __init__(self, reading: ToolReading | None = None) -> None:
        """Begin an answer.

        Args:
            reading: How calls of tools are found in it; None if there are no tools.
        """
        self._reading = reading
        self._readers: dict[int, OutputReader] = {}
        self._callers: set[int] = set()

    def whole(self, state: ChoiceState, texts: TokenTexts) -> JSONObject:
        """A message of the assistant."""
        message: JSONObject = {"role": "assistant", "content": state.text, "refusal": None}
        if self._reading is not None:
            read = self._reading.whole(state.text)
            if read.calls:
                self._callers.add(state.choice.index)
                message |= {"content": read.content or None, "tool_calls": [_call(call) for call in read.calls]}
        return {"message": message, "logprobs": chat_logprobs(texts, state.logprobs) if state.logprobs else None}

    def delta(self, state: ChoiceState, text: str, logprobs: Sequence[TokenLogprobs], texts: TokenTexts) -> JSONObject:
        """New text of the message; the first names the role."""
        scores = chat_logprobs(texts, logprobs) if logprobs else None
        return {"delta": self._role(state) | {"content": text}, "logprobs": scores}

    def deltas(
        self, state: ChoiceState, text: str, logprobs: Sequence[TokenLogprobs], texts: TokenTexts
    ) -> list[JSONObject]:
        """New text and calls of the message; the first names the role, the last has the log-probabilities."""
        if self._reading is None:
            return [self.delta(state, text, logprobs, texts)]
        news = [self._news(state, piece) for piece in self._pieces(state, text)]
        if not state.started:
            news[:1] = [self._role(state) | {"content": None if news else ""} | (news[0] if news else {})]
        elif not news and (logprobs or state.output):
            news = [{}]
        deltas: list[JSONObject] = [{"delta": new, "logprobs": None} for new in news]
        if deltas and logprobs:
            deltas[-1]["logprobs"] = chat_logprobs(texts, logprobs)
        return deltas

    def reason(self, state: ChoiceState, reason: str) -> str:
        """Calls of tools are a reason of their own; where `max_tokens` ended the answer, the last may not be whole."""
        return "tool_calls" if reason == FinishReason.STOP and state.choice.index in self._callers else reason

    def nothing(self) -> JSONObject:
        """An empty message."""
        return {"delta": {}, "logprobs": None}

    def _role(self, state: ChoiceState) -> JSONObject:
        return {} if state.started else {"role": "assistant"}

    def _pieces(self, state: ChoiceState, text: str) -> list[Piece]:
        assert self._reading is not None
        index = state.choice.index
        reader = self._readers.setdefault(index, self._reading.reader())
        return reader.feed(text) + (reader.finish() if state.output else [])

    def _news(self, state: ChoiceState, piece: Piece) -> JSONObject:
        match piece:
            case Content():
                return {"content": piece.text}
            case CallBegin():
                self._callers.add(state.choice.index)
                begun = {"index": piece.index, "id": piece.call_id, "type": "function"}
                return {"tool_calls": [begun | {"function": {"name": piece.name, "arguments": ""}}]}
            case CallArguments():
                return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}


def _call(call: ToolCall) -> JSONObject:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
