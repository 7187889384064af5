"""Log-probabilities in the two forms that OpenAI's API has."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvgraft.engine.requests.text import OutputText

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

    from kvgraft.engine.sampling.sampling import TokenLogprobs

_LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have; vLLM uses the same."""


_BROKEN = "\ufffd"
"""Written by decoders for bytes that are no character."""
_RUN = re.compile(f"{_BROKEN}+")
_BYTE = re.compile("<0x([0-9A-F]{2})>")


def _byte_letters() -> dict[str, int]:
    """Return the byte of each letter of byte-level vocabularies: printable ones for themselves, the rest from 256 on.

    Source: A. Radford et al., "Language Models are Unsupervised Multitask Learners" (GPT-2), 2019.
    """
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(shown)]
    return {chr(byte): byte for byte in shown} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_letters()


def _spelled_bytes(spelling: str) -> bytes | None:
    """Return the bytes of a token as vocabularies spell them: `<0xE6>`, or one letter per byte; None for other spellings."""
    found = _BYTE.fullmatch(spelling)
    if found:
        return bytes([int(found[1], 16)])
    known = [_BYTE_OF.get(letter) for letter in spelling]
    return bytes(byte for byte in known if byte is not None) if known and None not in known else None


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

    def added_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text; of several tokens they are a character together."""
        text = self[token_id]
        return (self._partial(token_id, text) if _BROKEN in text else None) or text.encode("utf-8", "replace")

    def name(self, token_id: int) -> str:
        """Return what log-probabilities call a token: its text, or as OpenAI does its bytes, if these are no characters."""
        added = self.added_bytes(token_id)
        try:
            added.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in added)
        return self[token_id]

    def _partial(self, token_id: int, text: str) -> bytes | None:
        """Return the bytes of a text with U+FFFD, from the token's spelling in the vocabulary; None if these do not fit."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        spelling = None if backend is None else backend.id_to_token(token_id)
        found = _spelled_bytes(spelling or "")
        same = found is not None and _RUN.sub(_BROKEN, found.decode("utf-8", "replace")) == _RUN.sub(_BROKEN, text)
        return found if same else None


class TokenIdTexts(TokenTexts):
    """For clients that want tokens named by their ids, which texts do not always show."""

    def name(self, token_id: int) -> str:
        """Return `token_id:N`."""
        return _by_number(token_id)


class TextOffsets:
    """Beginnings of tokens in the text that they decode to together, in characters.

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
        num_top: Number of most likely tokens reported besides the token itself; its rank is null if it is not among them.
    """
    return [None if token is None else _by_id(texts, token, num_top) for token in tokens]


def _by_id(texts: TokenTexts, token: TokenLogprobs, num_top: int) -> dict[str, object]:
    ranked: list[tuple[int, float, int | None]] = [
        (token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(token.top, start=1)
    ]
    own = [entry for entry in ranked if entry[0] == token.token_id] or [(token.token_id, token.logprob, None)]
    shown = {token_id: (logprob, rank) for token_id, logprob, rank in [*own, *ranked[:num_top]]}
    return {
        str(token_id): {"logprob": _logprob(logprob), "rank": rank, "decoded_token": texts[token_id]}
        for token_id, (logprob, rank) in shown.items()
    }


def _by_name(texts: TokenTexts, token: TokenLogprobs) -> dict[str, float]:
    """The likeliest tokens and the token itself, by name; of several with one name all but the first go by number."""
    likely = list(token.top)
    if token.token_id not in dict(likely):
        likely.append((token.token_id, token.logprob))
    names = {texts.name(token.token_id): token.token_id}
    shown: dict[str, float] = {}
    for token_id, logprob in likely:
        name = texts.name(token_id)
        is_first = names.setdefault(name, token_id) == token_id
        shown[name if is_first else _by_number(token_id)] = _logprob(logprob)
    return shown


def chat_logprobs(texts: TokenTexts, tokens: Sequence[TokenLogprobs]) -> dict[str, object]:
    """Return the form of `/v1/chat/completions`."""
    content = [
        _chat_token(texts, token.token_id, token.logprob)
        | {"top_logprobs": [_chat_token(texts, token_id, logprob) for token_id, logprob in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _chat_token(texts: TokenTexts, token_id: int, logprob: float) -> dict[str, object]:
    return {"token": texts.name(token_id), "logprob": _logprob(logprob), "bytes": list(texts.added_bytes(token_id))}


def _by_number(token_id: int) -> str:
    return f"token_id:{token_id}"


def _logprob(value: float) -> float:
    return value if value >= _LOWEST else _LOWEST
