"""JSON in and out: strict parsing of bodies, compact writing of answers."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, NoReturn

from starlette.responses import Response

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_MAYBE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_object(body: bytes) -> dict[str, object]:
    """Return the JSON object in `body`.

    Raises:
        ValueError: It is not UTF-8, not JSON, not an object, has a key twice, NaN, lone surrogates or too deep nesting.
    """
    try:
        text = body.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_distinct, parse_constant=_refuse_constant)
        if _MAYBE_SURROGATE.search(body):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError("the body is not valid UTF-8") from error
    except UnicodeEncodeError as error:
        raise ValueError("a text holds half of a surrogate pair, which is no character") from error
    except RecursionError as error:
        raise ValueError("the body is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"the body is not valid JSON: {error.msg} at character {error.pos}") from error
    if not isinstance(value, dict):
        raise ValueError('the body must be a JSON object such as {"prompt": "..."}')  # noqa: TRY004 - one error for callers
    return value


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
        raise ValueError(f"the key {twice[:60]!r} is given twice")
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
