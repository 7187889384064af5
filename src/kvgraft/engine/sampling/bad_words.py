"""Words that must not come about, as the sequences of tokens that `SamplingParams.bad_token_ids` takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.config import quoted
from kvgraft.errors import ConfigError, one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase


def bad_token_ids(tokenizer: PreTrainedTokenizerBase | None, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each word as it begins a text and as it follows a space, each sequence once.

    A word that is cut into tokens in another way, after letters say, may still come about.

    Raises:
        ConfigError: There is no tokenizer, or a word is no text, is empty or cannot be tokenised.
    """
    if tokenizer is None:
        raise ConfigError("bad words need a tokenizer, which this model does not have; give bad_token_ids")
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for ids in _forms(tokenizer, word):
            found[ids] = None
    return tuple(found)


def _forms(tokenizer: PreTrainedTokenizerBase, word: object) -> list[tuple[int, ...]]:
    if not isinstance(word, str) or not word:
        raise ConfigError(f"bad words are texts that are not empty, not {quoted(word)}")
    text = word.lstrip()
    if not text:
        return [_tokens(tokenizer, word)]
    plain, spaced = _tokens(tokenizer, text), _tokens(tokenizer, f" {text}")
    # Where the space is a token of its own, what bans the word bans it after a space, too.
    return [plain] if spaced[-len(plain) :] == plain else [plain, spaced]


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    try:
        ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    except Exception as error:  # lone surrogates have no UTF-8; a tokenizer is foreign code
        raise ConfigError(f"bad word {quoted(text)} cannot be tokenised: {one_line(error)}") from error
    if not ids:
        raise ConfigError(f"bad word {quoted(text)} has no tokens; leave it out")
    return ids
