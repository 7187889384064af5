"""JSON in and out: strict parsing of bodies, compact writing of answers."""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING, NoReturn

from starlette.responses import Response

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_MAYBE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_MOST_LEVELS = 200
"""Lists and objects in one another: what looks through a value takes up to three of Python's 1000 calls for each."""


class _RefusedError(ValueError):
    """JSON that is not read here."""


def parse_object(body: bytes) -> dict[str, object]:
    """Return the JSON object in `body`, which may begin with a byte order mark.

    Raises:
        ValueError: It is not UTF-8, not JSON, not an object, has a key twice, NaN, lone surrogates, too deep nesting or a
            number of too many digits.
    """
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError("the body is not valid UTF-8") from error
    try:
        value = parse_text(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"the body is not valid JSON: {error.msg} at character {error.pos}") from error
    if _MAYBE_SURROGATE.search(body) and has_half_characters(value):
        raise ValueError("a text holds half of a surrogate pair, which is no character")
    if not isinstance(value, dict):
        raise ValueError('the body must be a JSON object such as {"prompt": "..."}')  # noqa: TRY004 - one error for callers
    return value


def parse_text(text: str) -> object:
    """Return the JSON value that `text` is.

    Raises:
        JSONDecodeError: It is none.
        ValueError: It has a key twice, NaN, too deep nesting or a number of too many digits.
    """
    if text.startswith("\ufeff"):
        raise json.JSONDecodeError("there is a byte order mark", text, 0)
    too_deep = f"the JSON is nested too deeply; use at most {_MOST_LEVELS} levels of lists and objects"
    try:
        value = json.loads(text, object_pairs_hook=_distinct, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError(too_deep) from error
    except (json.JSONDecodeError, _RefusedError):
        raise
    except ValueError as error:  # Python's own, the only one that is left; it speaks to programmers
        raise ValueError(f"a number has more than {sys.get_int_max_str_digits():,} digits") from error
    if text.count("[") + text.count("{") > _MOST_LEVELS and nests_deeply(value):
        raise ValueError(too_deep)
    return value


def nests_deeply(value: object) -> bool:
    """Return whether a JSON value has more levels than can be looked through. O(size)."""
    level = [value]
    for _ in range(_MOST_LEVELS + 1):
        outer = [each for each in level if isinstance(each, dict | list)]
        if not outer:
            return False
        level = [inner for each in outer for inner in (each.values() if isinstance(each, dict) else each)]
    return True


def has_half_characters(value: object) -> bool:
    """Return whether a text of a JSON value has half of a surrogate pair; the value does not nest deeply. O(size)."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def json_bytes(value: object) -> bytes:
    """Write JSON without blanks; a number that JSON does not have raises `ValueError`."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return `value` as a response."""
    return Response(json_bytes(value), status, headers, media_type="application/json")


def _distinct(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _RefusedError(f"the key {twice[:60]!r} is given twice")
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise _RefusedError(f"{name} is no JSON number")
