"""Completions in OpenAI's form: `text_completion`, after the prompt where it is to be echoed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvgraft.server.answer import AnswerForm, ChoiceState, JSONObject
from kvgraft.server.logprobs import completion_logprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgraft.engine.sampling.sampling import TokenLogprobs
    from kvgraft.server.echo import PromptEcho
    from kvgraft.server.logprobs import TokenTexts


class CompletionForm(AnswerForm):
    """Text and its log-probabilities."""

    id_prefix, object_name, chunk_name = "cmpl-", "text_completion", "text_completion"
    prompt_in_choice = True

    def whole(self, state: ChoiceState, texts: TokenTexts) -> JSONObject:
        """Text and log-probabilities; with `echo` those of the prompt in front, the first of them null."""
        if state.echo is None:
            return self.delta(state, state.text, state.logprobs, texts)
        return self._echoed(state, state.echo, state.text, state.logprobs, texts)

    def deltas(
        self, state: ChoiceState, text: str, logprobs: Sequence[TokenLogprobs], texts: TokenTexts
    ) -> list[JSONObject]:
        """New text and its log-probabilities; before the first, if it is to be echoed, the prompt by itself."""
        if state.echo is None or state.started:
            return [self.delta(state, text, logprobs, texts)]
        echo = self._echoed(state, state.echo, "", (), texts)
        return [echo, self.delta(state, text, logprobs, texts)] if text or logprobs or state.output else [echo]

    def _echoed(
        self, state: ChoiceState, echo: PromptEcho, text: str, logprobs: Sequence[TokenLogprobs], texts: TokenTexts
    ) -> JSONObject:
        """The prompt and what follows it."""
        num_top, scores = state.choice.request.sampling.logprobs, None
        if num_top is not None and state.prompt is not None and state.prompt.logprobs is not None:
            prompt = _cut(state.prompt.logprobs, num_top)
            ids = [*state.prompt.token_ids.tolist(), *_ids(logprobs)]
            offsets = [*echo.offsets, *_offsets(state, logprobs)]
            scores = completion_logprobs(texts, ids, [*prompt, *logprobs], offsets)
        return {"text": echo.text + text, "logprobs": scores}

    def delta(self, state: ChoiceState, text: str, logprobs: Sequence[TokenLogprobs], texts: TokenTexts) -> JSONObject:
        """New text and its log-probabilities."""
        scores = completion_logprobs(texts, _ids(logprobs), logprobs, _offsets(state, logprobs)) if logprobs else None
        return {"text": text, "logprobs": scores}

    def nothing(self) -> JSONObject:
        """No text."""
        return {"text": "", "logprobs": None}


def _ids(logprobs: Sequence[TokenLogprobs]) -> list[int]:
    return [token.token_id for token in logprobs]


def _offsets(state: ChoiceState, logprobs: Sequence[TokenLogprobs]) -> list[int]:
    return [state.offsets.next(token.token_id) for token in logprobs]


def _cut(tokens: Sequence[TokenLogprobs | None], num_top: int) -> list[TokenLogprobs | None]:
    """More may be known of a prompt than of the output, because `prompt_logprobs` asked for it."""
    return [None if token is None else replace(token, top=token.top[:num_top]) for token in tokens]
