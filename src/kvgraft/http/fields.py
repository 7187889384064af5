"""Read typed fields of a JSON object; what does not fit is a 400 that names the field. `null` means absent."""

from __future__ import annotations

import difflib
import math
from typing import TYPE_CHECKING, cast

from kvgraft.http.errors import BadRequestError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MAX_NAME_CHARS = 60
"""Characters of a name that a client made up that are repeated to it."""
LEFT_OUT = object()
"""Stands in a list for an item that is left out, so that the others keep their numbers; no JSON value is it."""


_ALIKE = 0.82
"""Least likeness of a name that is proposed: at less, `top_a` was said to mean `top_p`, and `min_length` `min_tokens`."""


class Fields:
    """A JSON object and the path that leads to it."""

    def __init__(self, values: dict[str, object], path: str = "") -> None:
        self.values = values
        self._path = path

    def name(self, key: str) -> str:
        """Return the full name of a field, as in `messages[0].role`."""
        return f"{self._path}.{key}" if self._path else key

    def with_values(self, values: dict[str, object]) -> Fields:
        """Return another object that stands in this one's place."""
        return Fields(values, self._path)

    def error(self, key: str, problem: str) -> BadRequestError:
        """Return the error of a field."""
        return BadRequestError(f"{self.name(key)} {problem}", param=self.name(key))

    def has(self, key: str) -> bool:
        """Return whether the field is there and not null."""
        return self.values.get(key) is not None

    def text(self, key: str, default: str = "", *, max_chars: int | None = None) -> str:
        """Return a field that must be a text; raises `APIError` that names it otherwise."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"must be a string, not {kind_of(value)}")
        if max_chars is not None and len(value) > max_chars:
            raise self.error(key, f"must have at most {max_chars} characters")
        return value

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Return a field that must be true or false; raises `APIError` that names it otherwise."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, not {kind_of(value)}")
        return value

    def integer(self, key: str, default: int, low: int, high: int) -> int:
        """Return a whole number between `low` and `high`; 16.0 is one, as JSON knows no other kind of number."""
        value = whole_number(self._get(key, default))
        if value is None:
            raise self.error(key, f"must be a whole number, not {self._shown(key)}")
        if not low <= value <= high:
            raise self.error(key, f"must be between {low} and {high}")
        return value

    def number(self, key: str, default: float, low: float, high: float) -> float:
        """Return a number between `low` and `high`."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, f"must be a number, not {kind_of(value)}")
        if not low <= value <= high or not math.isfinite(value):
            raise self.error(key, f"must be between {low:g} and {high:g}")
        return float(value)

    def choice(self, key: str, default: str, allowed: Iterable[str]) -> str:
        """Return one of a few words."""
        value, words = self._get(key, default), list(allowed)
        if value not in words and value != default:
            raise self.error(key, f"must be one of {', '.join(words)}")
        assert isinstance(value, str)
        return value

    def texts(self, key: str, *, max_items: int, max_chars: int) -> tuple[str, ...]:
        """Return one text or a list of texts as a tuple; none of them empty."""
        value = self._get(key, [])
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise self.error(key, f"must be a string or a list of strings, not {kind_of(value)}")
        if len(texts) > max_items:
            raise self.error(key, f"must have at most {max_items} items")
        if not all(0 < len(text) <= max_chars for text in texts):
            raise self.error(key, f"must hold texts of 1 to {max_chars} characters")
        return tuple(texts)

    def token_ids(self, key: str, *, max_items: int) -> tuple[int, ...]:
        """Return a list of token ids as a tuple; whether the model has them is for the engine to say."""
        value = self._get(key, [])
        token_ids = whole_numbers(value) if isinstance(value, list) else None
        if token_ids is None or not all(0 <= token < 2**31 for token in token_ids):
            raise self.error(key, "must be a list of token ids, which are whole numbers from 0 on")
        if len(token_ids) > max_items:
            raise self.error(key, f"must have at most {max_items} items")
        return tuple(token_ids)

    def section(self, key: str, *, known: frozenset[str] | None = None) -> Fields:
        """Return an object, empty if absent; with `known`, other keys are refused."""
        value = self._get(key, {})
        if not isinstance(value, dict):
            raise self.error(key, f"must be an object, not {kind_of(value)}")
        inner = Fields(value, self.name(key))
        if known is not None:
            inner.check_keys(known)
        return inner

    def check_keys(self, known: Iterable[str]) -> None:
        """Refuse keys that are not `known`, with the closest one that is; for objects inside of bodies."""
        names = sorted(known)
        for name in self.values:
            if name not in names:
                closest = closest_name(name, names)
                hint = f"did you mean {closest!r}?" if closest else f"known are {', '.join(names)}"
                raise BadRequestError(
                    f"{self._path} has the unknown key {name[:MAX_NAME_CHARS]!r}; {hint}", param=self._path
                )

    def sections(self, key: str) -> list[Fields]:
        """Return a list of objects, empty if absent; without those that are left out."""
        value = self._get(key, [])
        if not isinstance(value, list):
            raise self.error(key, f"must be a list, not {kind_of(value)}")
        for number, item in enumerate(value):
            if item is not LEFT_OUT and not isinstance(item, dict):
                raise self.error(f"{key}[{number}]", f"must be an object, not {kind_of(item)}")
        numbered = ((number, item) for number, item in enumerate(value) if item is not LEFT_OUT)
        return [Fields(item, self.name(f"{key}[{number}]")) for number, item in numbered]

    def _shown(self, key: str) -> str:
        """A number that is not the right one, or the kind of what is none."""
        value = self.values.get(key)
        return f"{value:g}" if isinstance(value, float) else kind_of(value)

    def _get(self, key: str, default: object) -> object:
        value = self.values.get(key)
        return default if value is None else value


def whole_number(value: object) -> int | None:
    """Return a number of JSON that is whole, also if it is written with a point; None for all else, true and false too."""
    if type(value) is int:
        return value
    return int(value) if isinstance(value, float) and value.is_integer() else None


def whole_numbers(values: Sequence[object]) -> list[int] | None:
    """Return all of a list as whole numbers, or None if one is none."""
    numbers = [value if type(value) is int else whole_number(value) for value in values]
    return None if None in numbers else cast("list[int]", numbers)


def closest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the name that was probably meant, or None: a slip of the pen, not another word of the same letters."""
    return next(iter(difflib.get_close_matches(name[:MAX_NAME_CHARS], sorted(known), n=1, cutoff=_ALIKE)), None)


def kind_of(value: object) -> str:
    """Name the JSON type of a value."""
    kinds: dict[type, str] = {str: "a string", bool: "a boolean", int: "a number", float: "a number", list: "a list"}
    return kinds.get(type(value), "null" if value is None else "an object")
