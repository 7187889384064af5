"""Log-probabilities in the two forms that OpenAI's API has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.engine.text import OutputText

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

    from kvgraft.engine.sampling import TokenLogprobs

_LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have; vLLM uses the same."""


class TokenTexts:
    """Texts of single tokens. A token that is part of a character only reads as U+FFFD."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __getitem__(self, token_id: int) -> str:
        if token_id not in self._known:
            self._known[token_id] = (
                _by_number(token_id) if self.tokenizer is None else str(self.tokenizer.decode([token_id]))
            )
        return self._known[token_id]

    def name(self, token_id: int) -> str:
        """Return what log-probabilities call a token."""
        return self[token_id]


class TokenIdTexts(TokenTexts):
    """For clients that want tokens named by their ids, which texts do not always tell."""

    def name(self, token_id: int) -> str:
        """Return `token_id:N`."""
        return _by_number(token_id)


class TextOffsets:
    """Where tokens begin in the text that they decode to together, in characters.

    All tokens of one character begin where it does.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, start: int = 0, *, skip_special_tokens: bool = True
    ) -> None:
        """Begin at character `start`."""
        self._next = start
        self._text = OutputText(tokenizer, (), skip_special_tokens=skip_special_tokens)

    def next(self, token_id: int) -> int:
        """Return where the next token begins."""
        at = self._next
        self._next += len(self._text.push(token_id))
        return at


def completion_logprobs(
    texts: TokenTexts, token_ids: Sequence[int], tokens: Sequence[TokenLogprobs | None], offsets: Sequence[int]
) -> dict[str, object]:
    """Return the form of `/v1/completions`.

    Args:
        texts: Of tokens.
        token_ids: The tokens.
        tokens: What is known of each; None of the first one of a prompt.
        offsets: Character that each begins at.
    """
    return {
        "tokens": [texts.name(token_id) for token_id in token_ids],
        "token_logprobs": [None if token is None else _logprob(token.logprob) for token in tokens],
        "top_logprobs": [None if token is None else _by_name(texts, token) for token in tokens],
        "text_offset": list(offsets),
    }


def prompt_logprobs(texts: TokenTexts, tokens: Sequence[TokenLogprobs | None], num_top: int) -> list[object]:
    """Return log-probabilities of a prompt in vLLM's form: of each token an object by token id, null of the first.

    Args:
        texts: Of tokens.
        tokens: What is known of each.
        num_top: How many of the most likely are told besides the token itself, whose rank is null if it is not among them.
    """
    return [None if token is None else _by_id(texts, token, num_top) for token in tokens]


def _by_id(texts: TokenTexts, token: TokenLogprobs, num_top: int) -> dict[str, object]:
    ranked: list[tuple[int, float, int | None]] = [
        (token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(token.top, start=1)
    ]
    own = [entry for entry in ranked if entry[0] == token.token_id] or [(token.token_id, token.logprob, None)]
    told = {token_id: (logprob, rank) for token_id, logprob, rank in [*own, *ranked[:num_top]]}
    return {
        str(token_id): {"logprob": _logprob(logprob), "rank": rank, "decoded_token": texts[token_id]}
        for token_id, (logprob, rank) in told.items()
    }


def _by_name(texts: TokenTexts, token: TokenLogprobs) -> dict[str, float]:
    """Where several tokens have one name, the likeliest counts."""
    return {texts.name(token_id): _logprob(logprob) for token_id, logprob in reversed(token.top)}


def chat_logprobs(texts: TokenTexts, tokens: Sequence[TokenLogprobs]) -> dict[str, object]:
    """Return the form of `/v1/chat/completions`."""
    content = [
        _chat_token(texts, token.token_id, token.logprob)
        | {"top_logprobs": [_chat_token(texts, token_id, logprob) for token_id, logprob in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _chat_token(texts: TokenTexts, token_id: int, logprob: float) -> dict[str, object]:
    told = list(texts[token_id].encode("utf-8", "replace"))
    return {"token": texts.name(token_id), "logprob": _logprob(logprob), "bytes": told}


def _by_number(token_id: int) -> str:
    return f"token_id:{token_id}"


def _logprob(value: float) -> float:
    return value if value >= _LOWEST else _LOWEST
