"""Keep special tokens that messages spell from becoming control tokens of the prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from kvgraft.http.errors import BadRequestError
from kvgraft.literal_text import LiteralText, is_reserved, shield_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedTokenizerBase

Value = TypeVar("Value")


def shielded(tokenizer: PreTrainedTokenizerBase, given: Value) -> Value:
    """Return what a template is given, with a stand-in for each special token in its texts.

    Args:
        tokenizer: Has the special tokens.
        given: Texts, mappings, sequences and what else a body holds.

    Raises:
        BadRequestError: Beside special tokens there are characters that stand-ins are made of.
    """
    raised = _mapped(given, shield_of(tokenizer).raised)
    if raised != given:
        _mapped(given, _refuse_reserved)
    return raised


def spells_special_tokens(tokenizer: PreTrainedTokenizerBase, given: object) -> bool:
    """Return whether a special token stands in a text of what a template is given."""
    return _mapped(given, shield_of(tokenizer).raised) != given


def literal(tokenizer: PreTrainedTokenizerBase, rendered: str) -> str:
    """Return what a template made of shielded texts as it is to be read, and to be tokenised."""
    text = shield_of(tokenizer).lowered(rendered)
    return text if text == rendered else LiteralText(text, rendered)


def _refuse_reserved(text: str) -> str:
    if is_reserved(text):
        raise BadRequestError(
            "the messages spell special tokens and have characters for private use from U+108000 on, which stand for these "
            "here; leave one of them out",
            param="messages",
        )
    return text


def _mapped(given: Value, change: Callable[[str], str]) -> Value:
    """Return a copy in which all texts are changed, names of fields among them."""
    match given:
        case str():
            return change(given)  # type: ignore[return-value]
        case dict():
            return {_mapped(key, change): _mapped(value, change) for key, value in given.items()}  # type: ignore[return-value]
        case list() | tuple():
            return type(given)(_mapped(value, change) for value in given)
    return given
