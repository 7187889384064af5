"""Turn parts of choices into the objects of the API: one whole answer, or chunks of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvgraft.engine.requests.document_names import document_reuse
from kvgraft.engine.requests.request import FinishReason, PromptFacts
from kvgraft.reuse.report import report_as_dict
from kvgraft.server.logprobs import TextOffsets, TokenTexts, prompt_logprobs
from kvgraft.server.provisional import ProvisionalText
from kvgraft.server.reuse_summary import report_header, reuse_summary

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from kvgraft.engine.requests.request import RequestOutput, StreamPart
    from kvgraft.engine.sampling.sampling import TokenLogprobs
    from kvgraft.server.echo import PromptEcho
    from kvgraft.server.generation import ChoiceRequest
    from kvgraft.server.options import AnswerOptions
    from kvgraft.server.provisional import Change

JSONObject = dict[str, object]

RETRACTION = "kvgraft.retract"
"""`object` of the event that takes provisional text back."""


@dataclass(slots=True, eq=False)
class ChoiceState:
    """One choice as far as it has come.

    Attributes:
        choice: The choice.
        offsets: Where its tokens begin in its text.
        echo: What its text begins with, or None.
        text: All text after that.
        logprobs: Of all tokens.
        new_ids: Tokens that a stream's client does not know of.
        num_tokens: How many tokens of its answer there are.
        prompt: What is known of its prompt, from its first part on.
        started: A chunk went out.
        output: The result, once it is there.
        sent: The text that a stream's client has.
    """

    choice: ChoiceRequest
    offsets: TextOffsets
    echo: PromptEcho | None = None
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    new_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0
    prompt: PromptFacts | None = None
    started: bool = False
    output: RequestOutput | None = None
    sent: ProvisionalText = field(default_factory=ProvisionalText)

    def take(self, part: StreamPart) -> None:
        """Add a part of an answer that is not streamed."""
        self.text += part.text
        self.note(part)
        self.new_ids.append(part.token_id)
        if part.logprobs is not None:
            self.logprobs.append(part.logprobs)

    def note(self, part: StreamPart) -> None:
        """Take in all of a part but its text."""
        self.prompt = part.prompt or self.prompt
        self.output = part.output or self.output
        self.num_tokens += not part.is_provisional

    def drop_output(self) -> None:
        """Leave what was generated out of the answer."""
        self.text = ""
        self.logprobs.clear()
        self.new_ids.clear()


class AnswerForm(ABC):
    """Form in which an endpoint writes its choices.

    Attributes:
        id_prefix: Of the answer's id.
        object_name: `object` of a whole answer.
        chunk_name: `object` of a chunk.
        prompt_in_choice: Facts about the prompt stand in the choice; otherwise beside all of them.
        scores_end: Log-probabilities have the token that ends an answer, too, though it is no part of the text.
    """

    id_prefix: str
    object_name: str
    chunk_name: str
    prompt_in_choice = False
    scores_end = True

    @abstractmethod
    def whole(self, state: ChoiceState, texts: TokenTexts) -> JSONObject:
        """Return a finished choice, without index and reason."""

    @abstractmethod
    def delta(self, state: ChoiceState, text: str, logprobs: Sequence[TokenLogprobs], texts: TokenTexts) -> JSONObject:
        """Return the new part of a choice, without index and reason."""

    def deltas(
        self, state: ChoiceState, text: str, logprobs: Sequence[TokenLogprobs], texts: TokenTexts
    ) -> list[JSONObject]:
        """Return new parts of a choice, one per chunk; none if nothing of the text is certain yet."""
        return [self.delta(state, text, logprobs, texts)]

    @abstractmethod
    def nothing(self) -> JSONObject:
        """Return a new part that adds nothing, without index and reason."""

    def reason(self, state: ChoiceState, reason: str) -> str:
        """Return why a choice ended, which ended because of `reason`; asked for after `whole` or the last `deltas`."""
        return reason


class AnswerWriter:
    """Builds the answer to one HTTP request.

    Attributes:
        end: Data of the event that ends a stream; empty if none does.
    """

    end = b"[DONE]"

    def __init__(
        self,
        head: JSONObject,
        form: AnswerForm,
        choices: Sequence[ChoiceRequest],
        texts: TokenTexts,
        options: AnswerOptions,
        *,
        echoes: Sequence[PromptEcho] = (),
    ) -> None:
        """Begin an answer.

        Args:
            head: What all its objects carry: id, created, model.
            form: How choices look.
            choices: The answers that are generated.
            texts: Of tokens.
            options: What the client asked for.
            echoes: What each prompt's answers begin with; empty for nothing.
        """
        self._head = head
        self._form = form
        self._texts = texts
        self._options = options
        self._states = [self._state(choice, echoes) for choice in choices]

    def _state(self, choice: ChoiceRequest, echoes: Sequence[PromptEcho]) -> ChoiceState:
        echo = echoes[choice.prompt_index] if echoes else None
        start, skip = 0 if echo is None else len(echo.text), self._options.sampling.skip_special_tokens
        offsets = TextOffsets(self._texts.tokenizer, start, skip_special_tokens=skip)
        return ChoiceState(choice, offsets, echo)

    @property
    def outputs(self) -> list[RequestOutput]:
        """Results of the choices that are done."""
        return [state.output for state in self._states if state.output is not None]

    async def whole(self, parts: AsyncIterator[tuple[ChoiceRequest, StreamPart]]) -> JSONObject:
        """Wait for everything and return the answer."""
        async for choice, part in parts:
            self._states[choice.index].take(self._scored(part))
        choices = [self._choice(state) for state in self._states]
        answer: JSONObject = {**self._head, "object": self._form.object_name, "choices": choices, "usage": self.usage()}
        for state, choice_object in zip(self._states, choices, strict=True):
            (choice_object if self._form.prompt_in_choice else answer).update(self._prompt_facts(state))
            (answer if len(choices) == 1 else choice_object)["kvgraft"] = reuse_of(state, self._options.left_out)
        return answer

    def _choice(self, state: ChoiceState) -> JSONObject:
        if self._options.no_output:
            state.drop_output()
        shown = {"token_ids": state.new_ids} if self._options.return_token_ids else {}
        choice = self._form.whole(state, self._texts)
        return {"index": state.choice.index, **choice, "finish_reason": self._reason(state), **shown}

    def _prompt_facts(self, state: ChoiceState) -> JSONObject:
        """Return facts about a choice's prompt: none unless they are asked for."""
        facts: JSONObject = {}
        prompt = state.prompt or PromptFacts(state.choice.request.token_ids)
        if self._options.return_token_ids:
            facts["prompt_token_ids"] = [int(token) for token in prompt.token_ids]
        if self._options.prompt_logprobs is not None:
            facts["prompt_logprobs"] = prompt_logprobs(
                self._texts, prompt.logprobs or (), self._options.prompt_logprobs
            )
        return facts

    async def chunks(self, parts: AsyncIterator[tuple[ChoiceRequest, StreamPart]]) -> AsyncIterator[JSONObject]:
        """Yield chunks as parts come; the last of each choice carries its reason and what was reused.

        The first token of a choice always makes a chunk, so that clients see it in time; later ones do if they bring text.
        Provisional text is marked. An event before a chunk that contradicts what was sent takes that back.
        """
        async for choice, given in parts:
            state, part = self._states[choice.index], self._scored(given)
            state.note(part)
            if self._options.no_output:
                part = replace(part, text="", logprobs=None)  # the token is left out everywhere below
            elif not part.is_provisional:
                state.new_ids.append(part.token_id)
            change = state.sent.take(part)
            if change.characters:
                yield self._retraction(state, change)
            logprobs = () if part.logprobs is None or part.is_provisional else (part.logprobs,)
            if change.text or logprobs or part.output or not state.started:
                for chunk in self._new(state, change.text, logprobs, is_provisional=part.is_provisional):
                    yield chunk
        if self._options.include_usage:
            yield self._chunk([]) | {"usage": self.usage()}

    def _scored(self, part: StreamPart) -> StreamPart:
        """Return a part without log-probabilities that the form does not tell."""
        return replace(part, logprobs=None) if part.is_end and not self._form.scores_end else part

    def failed(self, payload: JSONObject) -> JSONObject:
        """Return the event that ends a stream that failed, from the body of the error."""
        return payload

    def usage(self) -> JSONObject:
        """Count tokens: each prompt once, however many choices it has; reused tokens are those of its first choice."""
        prompts = self._first_outputs()
        prompt_tokens = sum(len(output.prompt_token_ids) for output in prompts)
        completion_tokens = 0 if self._options.no_output else sum(len(output.token_ids) for output in self.outputs)
        summary = reuse_summary(prompts)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": summary["reused_tokens"]},
            "kvgraft": summary,
        }

    def headers(self) -> dict[str, str]:
        """Return the headers of a whole answer: what was reused, as in `usage`."""
        return report_header(reuse_summary(self._first_outputs()))

    def _first_outputs(self) -> list[RequestOutput]:
        """Results of the first choice of each prompt."""
        first = {state.choice.prompt_index: state.output for state in reversed(self._states)}
        return [output for output in first.values() if output is not None]

    def _new(
        self, state: ChoiceState, text: str, logprobs: Sequence[TokenLogprobs], *, is_provisional: bool
    ) -> list[JSONObject]:
        """Return chunks for what is new; facts about the prompt come with the first, all about the choice with the last."""
        deltas = self._form.deltas(state, text, logprobs, self._texts)
        if not deltas:
            return []
        facts = {} if state.started else self._prompt_facts(state)
        state.started = True
        if self._form.prompt_in_choice:
            deltas[0] |= facts
        if self._options.return_token_ids and not is_provisional:
            deltas[-1]["token_ids"], state.new_ids = state.new_ids, []
        shown: JSONObject | None = {"provisional": True} if is_provisional else reuse_of(state, self._options.left_out)
        chunks = [self._of_choice(state, delta, None, None) for delta in deltas[:-1]]
        chunks.append(self._of_choice(state, deltas[-1], self._reason(state), shown))
        if not self._form.prompt_in_choice:
            chunks[0] |= facts
        return chunks

    def _retraction(self, state: ChoiceState, change: Change) -> JSONObject:
        shown: JSONObject = {"retract": {"characters": change.characters, "tokens": change.tokens}}
        return self._of_choice(state, self._form.nothing(), None, shown) | {"object": RETRACTION}

    def _of_choice(
        self, state: ChoiceState, delta: JSONObject, reason: str | None, shown: JSONObject | None
    ) -> JSONObject:
        """Return a chunk about one choice; `shown` about its reuse stands beside the choice where there is but one."""
        choice_object: JSONObject = {"index": state.choice.index, **delta, "finish_reason": reason}
        chunk = self._chunk([choice_object])
        if shown is not None:
            (chunk if len(self._states) == 1 else choice_object)["kvgraft"] = shown
        return chunk

    def _reason(self, state: ChoiceState) -> str | None:
        if state.output is None:
            return None
        reason = FinishReason.LENGTH if self._options.no_output else state.output.finish_reason
        return self._form.reason(state, str(reason))

    def _chunk(self, choices: list[JSONObject]) -> JSONObject:
        chunk: JSONObject = {**self._head, "object": self._form.chunk_name, "choices": choices}
        if self._options.continuous_usage:
            return chunk | {"usage": self._usage_so_far()}
        return chunk | {"usage": None} if self._options.include_usage else chunk

    def _usage_so_far(self) -> JSONObject:
        """Tokens of all prompts, each once, and of all choices that have come; what was reused comes with the end."""
        known = {state.choice.prompt_index: state for state in reversed(self._states)}.values()
        prompt_tokens = sum(len((state.prompt or state.choice.request).token_ids) for state in known)
        completion_tokens = 0 if self._options.no_output else sum(state.num_tokens for state in self._states)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }


def reuse_of(state: ChoiceState, left_out: Sequence[str] = ()) -> JSONObject | None:
    """Return what was reused for a choice, its times, and what of the request is not served; None while it is not done."""
    if state.output is None:
        return None
    times = {"ttft_ms": state.output.ttft_s * 1e3, "total_ms": state.output.total_s * 1e3}
    documents = document_reuse(state.choice.request.documents, state.output.report)
    named = {"documents": documents} if documents else {}
    unserved: JSONObject = {"left_out": list(left_out)} if left_out else {}
    return report_as_dict(state.output.report) | named | times | unserved
