"""Turn parts of choices into the objects of the API: one whole answer, or chunks of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvgraft.reuse.report import report_as_dict
from kvgraft.server.logprobs import TokenTexts, chat_logprobs, completion_logprobs

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from kvgraft.engine.request import RequestOutput, StreamPart
    from kvgraft.engine.sampling import TokenLogprobs
    from kvgraft.server.generation import Choice

JSONObject = dict[str, object]


@dataclass(slots=True, eq=False)
class ChoiceState:
    """What is known of one choice so far.

    Attributes:
        choice: The choice.
        text: All text.
        logprobs: Of all tokens.
        offset: Characters of the tokens whose log-probabilities went out.
        started: A chunk went out.
        output: The result, once it is there.
    """

    choice: Choice
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    offset: int = 0
    started: bool = False
    output: RequestOutput | None = None


class AnswerForm(ABC):
    """How an endpoint writes its choices."""

    id_prefix: str
    object_name: str
    chunk_name: str

    @abstractmethod
    def whole(self, state: ChoiceState, texts: TokenTexts) -> JSONObject:
        """Return a finished choice, without index and reason."""

    @abstractmethod
    def delta(self, state: ChoiceState, text: str, logprobs: Sequence[TokenLogprobs], texts: TokenTexts) -> JSONObject:
        """Return the new part of a choice, without index and reason."""


class CompletionForm(AnswerForm):
    """How completions look: OpenAI's `text_completion`."""

    id_prefix, object_name, chunk_name = "cmpl-", "text_completion", "text_completion"

    def whole(self, state: ChoiceState, texts: TokenTexts) -> JSONObject:
        """Text and log-probabilities."""
        return {
            "text": state.text,
            "logprobs": completion_logprobs(texts, state.logprobs, 0) if state.logprobs else None,
        }

    def delta(self, state: ChoiceState, text: str, logprobs: Sequence[TokenLogprobs], texts: TokenTexts) -> JSONObject:
        """New text and its log-probabilities."""
        told = completion_logprobs(texts, logprobs, state.offset) if logprobs else None
        state.offset += sum(len(texts[token.token_id]) for token in logprobs)
        return {"text": text, "logprobs": told}


class ChatForm(AnswerForm):
    """How chat answers look: OpenAI's `chat.completion`, and its chunks."""

    id_prefix, object_name, chunk_name = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def whole(self, state: ChoiceState, texts: TokenTexts) -> JSONObject:
        """A message of the assistant."""
        return {
            "message": {"role": "assistant", "content": state.text, "refusal": None},
            "logprobs": chat_logprobs(texts, state.logprobs) if state.logprobs else None,
        }

    def delta(self, state: ChoiceState, text: str, logprobs: Sequence[TokenLogprobs], texts: TokenTexts) -> JSONObject:
        """New text of the message; the first names the role."""
        role = {} if state.started else {"role": "assistant"}
        return {"delta": role | {"content": text}, "logprobs": chat_logprobs(texts, logprobs) if logprobs else None}


class Answer:
    """Builds the answer to one HTTP request."""

    def __init__(
        self, head: JSONObject, form: AnswerForm, choices: Sequence[Choice], texts: TokenTexts, *, include_usage: bool
    ) -> None:
        """Begin an answer; `head` holds what all its objects carry: id, created, model."""
        self._head = head
        self._form = form
        self._include_usage = include_usage
        self._texts = texts
        self._states = [ChoiceState(choice) for choice in choices]

    @property
    def outputs(self) -> list[RequestOutput]:
        """Results of the choices that are done."""
        return [state.output for state in self._states if state.output is not None]

    async def whole(self, parts: AsyncIterator[tuple[Choice, StreamPart]]) -> JSONObject:
        """Wait for everything and return the answer."""
        async for choice, part in parts:
            state = self._states[choice.index]
            state.text += part.text
            state.output = part.output or state.output
            if part.logprobs is not None:
                state.logprobs.append(part.logprobs)
        choices = [
            {"index": state.choice.index, **self._form.whole(state, self._texts), "finish_reason": _reason(state)}
            for state in self._states
        ]
        answer: JSONObject = {**self._head, "object": self._form.object_name, "choices": choices, "usage": self.usage()}
        for state, choice_object in zip(self._states, choices, strict=True):
            (answer if len(choices) == 1 else choice_object)["kvgraft"] = _reuse(state)
        return answer

    async def chunks(self, parts: AsyncIterator[tuple[Choice, StreamPart]]) -> AsyncIterator[JSONObject]:
        """Yield chunks as parts come; the last of each choice carries its reason and what was reused.

        The first token of a choice always makes a chunk, so that clients see it in time; later ones do if they bring text.
        """
        async for choice, part in parts:
            state = self._states[choice.index]
            state.output = part.output
            if state.started and not (part.text or part.logprobs or part.output):
                continue
            logprobs = () if part.logprobs is None else (part.logprobs,)
            delta = self._form.delta(state, part.text, logprobs, self._texts)
            state.started = True
            reason = None if part.output is None else _reason(state)
            choice_object: JSONObject = {"index": choice.index, **delta, "finish_reason": reason}
            chunk = self._chunk([choice_object])
            if part.output is not None:
                (chunk if len(self._states) == 1 else choice_object)["kvgraft"] = _reuse(state)
            yield chunk
        if self._include_usage:
            yield self._chunk([]) | {"usage": self.usage()}

    def usage(self) -> JSONObject:
        """Count tokens: each prompt once, however many choices it has; reused tokens are those of its first choice."""
        first = {state.choice.prompt_index: state.output for state in reversed(self._states)}
        prompts = [output for output in first.values() if output is not None]
        prompt_tokens = sum(len(output.prompt_token_ids) for output in prompts)
        completion_tokens = sum(len(output.token_ids) for output in self.outputs)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(int(output.report.reused_tokens) for output in prompts)},
        }

    def _chunk(self, choices: list[JSONObject]) -> JSONObject:
        chunk: JSONObject = {**self._head, "object": self._form.chunk_name, "choices": choices}
        return chunk | {"usage": None} if self._include_usage else chunk


def _reason(state: ChoiceState) -> str | None:
    return None if state.output is None else str(state.output.finish_reason)


def _reuse(state: ChoiceState) -> JSONObject | None:
    if state.output is None:
        return None
    times = {"ttft_ms": state.output.ttft_s * 1e3, "total_ms": state.output.total_s * 1e3}
    return report_as_dict(state.output.report) | times
