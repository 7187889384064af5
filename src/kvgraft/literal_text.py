"""Text in which special tokens that users spelled are text, while those of a chat template are control tokens."""

from __future__ import annotations

import re
import threading
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerBase

_SPELLED, _WRITTEN, _END = 0x108000, 0x10C000, 0x10FFFF
"""Code points for private use that stand for special tokens: those that users spelled, and those that a template wrote."""
_RESERVED = re.compile(f"[{chr(_SPELLED)}-{chr(_END)}]")


def is_reserved(text: str) -> bool:
    """Whether a text has characters that stand-ins are made of: beside special tokens it could be taken for one."""
    return _RESERVED.search(text) is not None


class LiteralText(str):
    """A prompt that is read as any other text; which of its special tokens are control tokens, its second form says.

    Attributes:
        shielded: The same, of the same length, with stand-ins for what is not to become a control token.
    """

    __slots__ = ("shielded",)

    shielded: str

    def __new__(cls, text: str, shielded: str) -> LiteralText:
        """Take what `Shield.lowered` makes of a `shielded` text, and that text."""
        made = super().__new__(cls, text)
        made.shielded = shielded
        return made


class Shield:
    """Puts stand-ins of equal length into the place of special tokens. Thread-safe.

    Attributes:
        names: Texts of the special tokens.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        """Take the texts of special tokens; the longest of several that begin alike is found."""
        self.names = names[: _WRITTEN - _SPELLED]
        self._found = re.compile("|".join(map(re.escape, sorted(self.names, key=len, reverse=True)))) if names else None
        self._numbers = {name: number for number, name in enumerate(self.names)}

    def raised(self, text: str) -> str:
        """Return `text` with a stand-in for each special token."""
        if self._found is None:
            return text
        return self._found.sub(lambda found: self._stand_in(found[0], _SPELLED), text)

    def lowered(self, text: str) -> str:
        """Return `text` with special tokens in the place of their stand-ins."""
        present = {ord(character) - _SPELLED for character in _RESERVED.findall(text)}
        for number in present & set(range(len(self.names))):
            text = text.replace(self._stand_in(self.names[number], _SPELLED), self.names[number])
        return text

    def marked(self, shielded: str) -> str:
        """Return a text with marks for the special tokens that stood there, and special tokens for the stand-ins."""
        assert self._found is not None
        return self.lowered(self._found.sub(lambda found: self._stand_in(found[0], _WRITTEN), shielded))

    def marks(self) -> dict[str, str]:
        """Return the mark of each special token."""
        return {name: self._stand_in(name, _WRITTEN) for name in self.names}

    def _stand_in(self, name: str, base: int) -> str:
        return chr(base + self._numbers[name]) * len(name)


class Encoded(NamedTuple):
    """A text as tokens.

    Attributes:
        token_ids: The tokens.
        offsets: First character of each and the one after its last; None if not asked for.
    """

    token_ids: list[int]
    offsets: list[tuple[int, int]] | None


def encode(
    tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool, with_offsets: bool = False
) -> Encoded:
    """Tokenise a text as all of the engine does; a text that begins with the begin-of-text token gets no second one.

    Args:
        tokenizer: The model's; a fast one if offsets are asked for.
        text: The text.
        add_special_tokens: Whether the tokenizer adds its own.
        with_offsets: Return them.

    Raises:
        ConfigError: The text spells special tokens, and this tokenizer cannot take them for text.
    """
    if isinstance(text, LiteralText):
        encoded = _twin_of(tokenizer).encode(text, add_special_tokens=add_special_tokens)
    else:
        asked = {"return_offsets_mapping": True} if with_offsets else {}
        made = tokenizer(text, add_special_tokens=add_special_tokens, **asked)
        encoded = Encoded(made["input_ids"], made["offset_mapping"] if with_offsets else None)
    return _with_one_start(tokenizer, text, encoded) if add_special_tokens else encoded


def _with_one_start(tokenizer: PreTrainedTokenizerBase, text: str, encoded: Encoded) -> Encoded:
    start: int | None = getattr(tokenizer, "bos_token_id", None)
    if start is None or encoded.token_ids[:2] != [start, start] or not text.startswith(str(tokenizer.bos_token)):
        return encoded
    return Encoded(encoded.token_ids[1:], None if encoded.offsets is None else encoded.offsets[1:])


@lru_cache(maxsize=8)
def _shield(names: tuple[str, ...]) -> Shield:
    return Shield(names)


def shield_of(tokenizer: PreTrainedTokenizerBase) -> Shield:
    """Return what finds the special tokens of a model in a text: those that are marked as such or have a role."""
    added, roles = getattr(tokenizer, "added_tokens_decoder", {}), getattr(tokenizer, "all_special_tokens", ())
    return _shield(tuple(token.content for token in added.values() if token.special or token.content in roles))


class _Twin:
    """A copy of a tokenizer that takes special tokens for text, and marks for special tokens. Thread-safe.

    The marks are tokens of the copy that split a text where the special tokens would, so that all around them is tokenised as
    ever. As large as the tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        from tokenizers import Tokenizer

        self._shield = shield_of(tokenizer)
        marks = self._shield.marks()
        special = {token.content: (number, token) for number, token in tokenizer.added_tokens_decoder.items()}
        copied: Any = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        copied.no_truncation()
        copied.no_padding()
        copied.encode_special_tokens = True
        copied.add_special_tokens([special[name][1] for name in marks])  # some files mark none
        copied.add_tokens([_like(special[name][1], mark) for name, mark in marks.items()])
        self._copied = copied
        self._control = {copied.token_to_id(mark): special[name][0] for name, mark in marks.items()}

    def encode(self, text: LiteralText, *, add_special_tokens: bool) -> Encoded:
        """Tokenise; offsets are those of `text`, for stand-ins and marks are as long as what they stand for."""
        made = self._copied.encode(self._shield.marked(text.shielded), add_special_tokens=add_special_tokens)
        return Encoded([self._control.get(token, token) for token in made.ids], list(made.offsets))


def _like(token: AddedToken, mark: str) -> AddedToken:
    """Return a token that splits a text as `token` does."""
    from tokenizers import AddedToken as Added

    strips = {"lstrip": token.lstrip, "rstrip": token.rstrip, "single_word": token.single_word}
    return Added(mark, normalized=False, **strips)


_TWINS: WeakKeyDictionary[PreTrainedTokenizerBase, _Twin] = WeakKeyDictionary()
_LOCK = threading.Lock()


def _twin_of(tokenizer: PreTrainedTokenizerBase) -> _Twin:
    """Return the copy, made with the first text that needs it."""
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ConfigError(
            "this model's tokenizer cannot take the special tokens that a message spells for text; leave them out, or start "
            "the server with --chat-special-tokens control"
        )
    with _LOCK:
        if tokenizer not in _TWINS:
            _TWINS[tokenizer] = _Twin(tokenizer)
        return _TWINS[tokenizer]
