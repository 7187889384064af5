"""Log-probabilities in the two forms that OpenAI's API has."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

    from kvgraft.engine.sampling import TokenLogprobs

_LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have; vLLM uses the same."""


class TokenTexts:
    """Texts of single tokens. A token that is part of a character only reads as U+FFFD."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __getitem__(self, token_id: int) -> str:
        if token_id not in self._known:
            self._known[token_id] = (
                f"token_id:{token_id}" if self._tokenizer is None else str(self._tokenizer.decode([token_id]))
            )
        return self._known[token_id]


def completion_logprobs(texts: TokenTexts, tokens: Sequence[TokenLogprobs], offset: int) -> dict[str, object]:
    """Return the form of `/v1/completions`; `offset` is the number of characters in front of the first token."""
    names = [texts[token.token_id] for token in tokens]
    offsets = []
    for name in names:
        offsets.append(offset)
        offset += len(name)
    return {
        "tokens": names,
        "token_logprobs": [_logprob(token.logprob) for token in tokens],
        "top_logprobs": [{texts[i]: _logprob(p) for i, p in token.top} for token in tokens],
        "text_offset": offsets,
    }


def chat_logprobs(texts: TokenTexts, tokens: Sequence[TokenLogprobs]) -> dict[str, object]:
    """Return the form of `/v1/chat/completions`."""
    content = [
        _chat_token(texts, token.token_id, token.logprob)
        | {"top_logprobs": [_chat_token(texts, token_id, logprob) for token_id, logprob in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _chat_token(texts: TokenTexts, token_id: int, logprob: float) -> dict[str, object]:
    text = texts[token_id]
    return {"token": text, "logprob": _logprob(logprob), "bytes": list(text.encode("utf-8", "replace"))}


def _logprob(value: float) -> float:
    return value if value >= _LOWEST else _LOWEST
