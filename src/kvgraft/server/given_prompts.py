"""The prompts of a completion: texts or token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.http.fields import kind_of, whole_numbers

if TYPE_CHECKING:
    from kvgraft.http.fields import Fields

MAX_CHOICES = 128
"""Prompts times `n` of one HTTP request; each is a request of the engine."""


def parse_prompts(fields: Fields, vocab_size: int) -> list[str | list[int]]:
    """Return the prompts of `prompt`: a string, a list of strings, token ids, or a list of token id lists."""
    prompt = fields.values.get("prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        problem = "is missing" if prompt is None else "is empty" if prompt == [] else f"must not be {kind_of(prompt)}"
        raise fields.error("prompt", f"{problem}; give a string, a list of strings, token ids or a list of those")
    if isinstance(prompt[0], int | float):
        return [parse_token_ids(fields, "prompt", prompt, vocab_size)]
    if len(prompt) > MAX_CHOICES:
        raise fields.error("prompt", f"must hold at most {MAX_CHOICES} prompts; send several requests")
    return [
        item if isinstance(item, str) else parse_token_ids(fields, f"prompt[{number}]", item, vocab_size)
        for number, item in enumerate(prompt)
    ]


def parse_token_ids(fields: Fields, key: str, value: object, vocab_size: int) -> list[int]:
    """Return token ids of the vocabulary, at least one; `key` names them in errors."""
    if not isinstance(value, list) or not value:
        raise fields.error(key, "must be text or token ids, at least one")
    token_ids = whole_numbers(value)
    if token_ids is None:
        raise fields.error(key, "must hold whole numbers only, or strings only")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        raise fields.error(key, f"has token ids outside [0, {vocab_size}); was it tokenised for another model?")
    return token_ids
