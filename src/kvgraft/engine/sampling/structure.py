"""Structure of an output, as text: a JSON value of a schema, a text of a regular expression or a grammar, one of a few."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from kvgraft.config import quoted
from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor


MAX_CHARS = 2**17
"""Longest source of a structure."""


class StructureKind(StrEnum):
    """Form in which a `StructureSpec` says what is allowed."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    PARTS = "parts"


@dataclass(frozen=True, slots=True)
class StructureSpec:
    """Structure that an output must have. Equal ones are compiled once.

    Attributes:
        kind: How `source` is to be read.
        source: JSON text of a schema; a regular expression; a grammar; JSON text of a list of choices, or of the parts.
        compact: Leave no whitespace between the tokens of JSON.
    """

    kind: StructureKind
    source: str = ""
    compact: bool = False

    @staticmethod
    def json_object(*, compact: bool = False) -> StructureSpec:
        """Any JSON object."""
        return StructureSpec(StructureKind.JSON_OBJECT, compact=compact)

    @staticmethod
    def json_schema(schema: Mapping[str, object] | bool, *, compact: bool = False) -> StructureSpec:
        """A JSON value of a schema; raises `ConfigError` for what JSON cannot hold."""
        return StructureSpec(StructureKind.JSON_SCHEMA, _as_json(schema), compact)

    @staticmethod
    def regex(pattern: str) -> StructureSpec:
        """A text that a regular expression matches as a whole."""
        return StructureSpec(StructureKind.REGEX, pattern)

    @staticmethod
    def choice(texts: Sequence[str]) -> StructureSpec:
        """One of some texts."""
        return StructureSpec(StructureKind.CHOICE, _as_json(list(texts)))

    @staticmethod
    def grammar(text: str) -> StructureSpec:
        """A text of a context-free grammar, in the syntax of llguidance (docs/structured.md)."""
        return StructureSpec(StructureKind.GRAMMAR, text)

    @staticmethod
    def parts(parts: Sequence[Mapping[str, object]]) -> StructureSpec:
        """Texts and JSON values one after the other, for tool calls.

        Args:
            parts: Each is one of `{"text": "..."}`, literal text, where the text of a special token is that token;
                `{"schema": {...}}`, a JSON value of it; `{"any_of": [[part, ...], ...]}`, one of several sequences;
                `{"repeat": [part, ...]}`, once or more, and with `"separator": "..."` that text between;
                `{"optional": [part, ...]}`; `{"free": {"until": ["...", ...]}}`, any text, also none, that contains none
                of these texts. After free text comes its end, or what begins with one of these texts.
        """
        return StructureSpec(StructureKind.PARTS, _as_json(list(parts)))


class StructureState(Protocol):
    """State of an output in its structure. One per request; not thread-safe.

    `mask` and `few` say the same: a draw from the logits of few tokens costs less than one from all that are masked.
    """

    def mask(self, logits: Tensor) -> Tensor:
        """Return float32 (vocab_size,) logits that are minus infinity where a token would break the structure.

        Raises:
            StructureError: The structure cannot be followed further.
            RequestError: The machine is too busy to follow it.
        """

    def few(self, num_logits: int) -> Tensor | None:
        """Return int64 (num_few,) which of `num_logits` tokens may follow, ascending; None if they are not few.

        Raises:
            StructureError: The structure cannot be followed further.
            RequestError: The machine is too busy to follow it.
        """

    def accept(self, token_id: int) -> None:
        """Go on after a token that was drawn from what `mask` or `few` left; what follows is found out in the background."""

    def fork(self) -> StructureState:
        """Return a copy that goes its own way."""


class Structure(Protocol):
    """A compiled `StructureSpec`: immutable, shared by requests and threads."""

    def start(self) -> StructureState:
        """Return the state before the first token."""


def _as_json(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"a structure is made of JSON values, not {quoted(value)}") from error
