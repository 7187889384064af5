"""A prompt as the beginning of its answer: its text, and where its tokens begin in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvgraft.engine.requests.token_spans import token_spans
from kvgraft.server.logprobs import TextOffsets, TokenTexts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvgraft.types import TokenArray


@dataclass(frozen=True, slots=True)
class PromptEcho:
    """The beginning of an answer with `echo`.

    Attributes:
        text: The prompt.
        offsets: Character of `text` that each token begins at.
    """

    text: str
    offsets: tuple[int, ...]


def echo_of(
    prompt: str | list[int],
    token_ids: TokenArray,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    add_special_tokens: bool,
) -> PromptEcho:
    """Return the echo of a prompt: a text as it was given, tokens as what they decode to, special ones included.

    Args:
        prompt: As the client gave it.
        token_ids: Its tokens, int64.
        tokenizer: Of the model, or None.
        add_special_tokens: The tokenizer added its own, which have no text.
    """
    if isinstance(prompt, str):
        spans = token_spans(tokenizer, prompt, add_special_tokens=add_special_tokens)
        if spans is not None:
            return PromptEcho(prompt, tuple(start for start, _ in spans))
    offsets = TextOffsets(tokenizer, skip_special_tokens=isinstance(prompt, str))
    starts = tuple(offsets.next(int(token)) for token in token_ids)
    if isinstance(prompt, str):
        return PromptEcho(prompt, tuple(min(start, len(prompt)) for start in starts))
    texts = TokenTexts(tokenizer)
    text = "".join(texts[token] for token in prompt) if tokenizer is None else str(tokenizer.decode(prompt))
    return PromptEcho(text, starts)
