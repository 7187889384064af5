"""Write choices and parts (`StructureSpec.parts`) as grammars in llguidance's Lark syntax.

A lexer reads as much as it can, so free text would swallow what ends it. Free text and the text that ends it are one lexeme
therefore: `_Writer._after_free` looks what may come after free text and draws its first text into the free text's rule.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from kvgraft.config import quoted
from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_KINDS = {
    "text": {"text"},
    "schema": {"schema"},
    "any_of": {"any_of"},
    "repeat": {"repeat", "separator"},
    "optional": {"optional"},
    "free": {"free"},
}
_DEEPEST = 8
"""Parts within parts."""


def choice_grammar(texts: Sequence[object]) -> str:
    """Return the grammar of one of some texts.

    Raises:
        ConfigError: There is none, or one is no text or empty.
    """
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise ConfigError("a choice is among one or more texts, none of them empty")
    return f"start: CHOICE\nCHOICE: {' | '.join(dict.fromkeys(_literal(str(text)) for text in texts))}\n"


def parts_grammar(
    parts: Sequence[object], special_tokens: Mapping[str, int], json_rule: Callable[[object], str]
) -> str:
    """Return the grammar of parts one after the other.

    Args:
        parts: As `StructureSpec.parts` takes them.
        special_tokens: Ids of special tokens by their texts; in a literal text each stands for itself.
        json_rule: Turns a schema into what stands for a JSON value of it in a rule; raises `ConfigError`.

    Raises:
        ConfigError: A part is not what parts are.
    """
    writer = _Writer(special_tokens, json_rule)
    start = writer.sequence(parts, 0)
    return "\n".join([f"start: {start or _literal('')}", *writer.lines]) + "\n"


class _Writer:
    """The rules of one grammar.

    Attributes:
        lines: Of the rules besides `start`.
    """

    def __init__(self, special_tokens: Mapping[str, int], json_rule: Callable[[object], str]) -> None:
        self.lines: list[str] = []
        self._special_tokens = special_tokens
        self._json_rule = json_rule
        texts = sorted(special_tokens, key=len, reverse=True)
        self._specials = re.compile("|".join(map(re.escape, texts))) if texts else None

    def sequence(self, parts: object, depth: int) -> str:
        """Return the expression of parts one after the other; empty for none."""
        if not isinstance(parts, list):
            raise ConfigError(f"parts are a list of objects, not {quoted(parts)}")
        if depth > _DEEPEST:
            raise ConfigError(f"parts lie within parts at most {_DEEPEST} levels deep")
        pieces: list[str] = []
        for number, part in enumerate(parts):
            kind, value = _kind_of(part)
            if kind == "free":
                return " ".join([*pieces, self._after_free(self._ends(value), parts[number + 1 :], depth)])
            pieces.append(self._part(kind, value, part, depth))
        return " ".join(piece for piece in pieces if piece)

    def _part(self, kind: str, value: object, part: Mapping[str, object], depth: int) -> str:
        if kind == "text":
            return self._text(value)
        if kind == "schema":
            return self._json_rule(value)
        if kind == "any_of":
            return self._rule(" | ".join(self._filled(option, depth) for option in _options(value)))
        inner = self._rule(self._filled(value, depth))
        return f"{inner}?" if kind == "optional" else f"{inner} {self._again(inner, part)}"

    def _again(self, inner: str, part: Mapping[str, object]) -> str:
        """Further times of what is repeated."""
        return f"({self._text(part.get('separator', ''))} {inner})*"

    def _filled(self, parts: object, depth: int) -> str:
        """A sequence that is not empty, on a level of its own."""
        if not parts:
            raise ConfigError("what is repeated, optional or one of several has one part at least")
        return self.sequence(parts, depth + 1) or _literal("")

    def _text(self, text: object) -> str:
        """Literal text; special tokens in it are named by their ids."""
        if not isinstance(text, str):
            raise ConfigError(f"the text of a part is a text, not {quoted(text)}")
        pieces: list[str] = []
        end = 0
        for found in self._specials.finditer(text) if self._specials is not None else ():
            pieces += [_literal(text[end : found.start()]), f"<[{self._special_tokens[found[0]]}]>"]
            end = found.end()
        pieces.append(_literal(text[end:]))
        return " ".join(piece for piece in pieces if piece != _literal(""))

    def _rule(self, expression: str) -> str:
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}: {expression}")
        return name

    def _ends(self, value: object) -> list[str]:
        """The texts that end free text; one that begins with a special token is that token."""
        until = _mapping(value).get("until", [])
        if not isinstance(until, list) or not all(isinstance(text, str) and text for text in until):
            raise ConfigError(f"until is a list of texts, none of them empty, not {quoted(until)}")
        found = [self._specials.match(text) if self._specials is not None else None for text in until]
        return [text if special is None else special[0] for text, special in zip(until, found, strict=True)]

    def _after_free(self, until: Sequence[str], parts: object, depth: int) -> str:
        """Free text without the texts `until`, and what follows it."""
        if not isinstance(parts, list):
            raise ConfigError(f"parts are a list of objects, not {quoted(parts)}")
        if not parts and depth:
            raise ConfigError(
                "free text inside of other parts ends with one of the texts of its until; let that follow it"
            )
        if not parts:
            return self._free_text(until)
        kind, value = _kind_of(parts[0])
        rest = self.sequence(parts[1:], depth)
        if kind == "text":
            return f"{self._ended_by(until, value)} {rest}"
        if kind == "any_of":
            options = (self._after_free(until, option, depth + 1) for option in _options(value))
            return f"{self._rule(' | '.join(options))} {rest}"
        if kind == "repeat":
            inner, first = self._rule(self._filled(value, depth)), self._after_free(until, value, depth + 1)
            return f"{first} {self._again(inner, dict(_mapping(parts[0])))} {rest}"
        if kind == "optional":
            with_it = f"{self._after_free(until, value, depth + 1)} {rest}"
            return self._rule(f"{with_it} | {self._after_free(until, parts[1:], depth)}")
        raise ConfigError("after free text comes its end, or what begins with one of the texts of its until")

    def _ended_by(self, until: Sequence[str], text: object) -> str:
        """Free text, and a literal text that begins with one of `until`."""
        end = next((end for end in sorted(until, key=len, reverse=True) if str(text).startswith(end)), None)
        if end is None:
            raise ConfigError(f"after free text comes one of the texts of its until, not {quoted(text)}")
        if end in self._special_tokens:
            return f"{self._free_text(until)} {self._text(text)}"
        ended = self._terminal(f"{self._free_text(until)} {_literal(end)}")
        lazy = f"r{len(self.lines)}"
        self.lines.append(f"{lazy}[lazy]: {ended}")
        return f"{lazy} {self._text(str(text)[len(end) :])}"

    def _free_text(self, until: Sequence[str]) -> str:
        """The terminal of texts that contain none of `until`; special tokens are in no text anyway."""
        ends = [end for end in until if end not in self._special_tokens]
        anything = "/(?s:.*)/"
        if not ends:
            return self._terminal(anything)
        return self._terminal(f"{anything} & ~({anything} ({' | '.join(map(_literal, ends))}) {anything})")

    def _terminal(self, expression: str) -> str:
        name = f"T{len(self.lines)}"
        self.lines.append(f"{name}: {expression}")
        return name


def _kind_of(part: object) -> tuple[str, object]:
    """Return which kind a part is, and what is said of it."""
    keys = set(_mapping(part))
    for kind, known in _KINDS.items():
        if kind in keys and keys <= known:
            return kind, _mapping(part)[kind]
    raise ConfigError(f"a part has one of the keys {', '.join(_KINDS)}, not {quoted(part)}")


def _mapping(part: object) -> Mapping[str, object]:
    if not isinstance(part, dict):
        raise ConfigError(f"a part is an object, not {quoted(part)}")
    return part


def _options(value: object) -> list[list[object]]:
    if not isinstance(value, list) or not value or not all(isinstance(option, list) for option in value):
        raise ConfigError(f"any_of is a list of lists of parts, not {quoted(value)}")
    return value


def _literal(text: str) -> str:
    """A string of the grammar. Raises `ConfigError` for what has no UTF-8."""
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ConfigError(f"a structure is made of whole characters, not {quoted(text)}")
    return json.dumps(text, ensure_ascii=False)
