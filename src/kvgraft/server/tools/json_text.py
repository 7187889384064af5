"""Objects of JSON in a text that is still being written."""

from __future__ import annotations

import json
import re
from typing import NoReturn

from kvgraft.server.tools.base import MalformedCallError, WrittenCall

_BLANKS = re.compile(r"\s*")
_STRUCTURE = re.compile(r'"(?:[^"\\]|\\.)*+"|["{}\[\]]', re.DOTALL)
_ARGUMENT_KEYS = ("arguments", "parameters")


def skip_blanks(text: str, start: int = 0) -> int:
    """Return where the first character from `start` on stands that is not white."""
    found = _BLANKS.match(text, start)
    assert found is not None
    return found.end()


def end_of_value(text: str, start: int) -> int | None:
    """Return where the object or list that begins at `start` ends, None if it has not ended. O(length)."""
    depth = 0
    for found in _STRUCTURE.finditer(text, start):
        mark = found[0]
        if mark == '"':  # a string that has not ended
            return None
        if mark in "{[":
            depth += 1
        elif mark in "}]":
            depth -= 1
            if depth == 0:
                return found.end()
    return None


def load(text: str) -> object:
    """Return the JSON value of a text; raises `MalformedCallError`."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise MalformedCallError from error


def members(text: str) -> dict[str, str]:
    """Return the JSON text of each member of an object; raises `MalformedCallError` if it is none."""
    if not isinstance(load(text), dict):
        raise MalformedCallError
    decoder, found = json.JSONDecoder(), {}
    position = skip_blanks(text, 1)
    while text[position] != "}":
        key, position = decoder.raw_decode(text, position)
        start = skip_blanks(text, skip_blanks(text, position) + 1)  # after the colon
        _, position = decoder.raw_decode(text, start)
        found[str(key)] = text[start:position]
        position = skip_blanks(text, position)
        if text[position] == ",":
            position = skip_blanks(text, position + 1)
    return found


def items(text: str) -> list[str]:
    """Return the JSON text of each item of a list; raises `MalformedCallError` if it is none."""
    if not isinstance(load(text), list):
        raise MalformedCallError
    decoder, found = json.JSONDecoder(), []
    position = skip_blanks(text, 1)
    while text[position] != "]":
        _, end = decoder.raw_decode(text, position)
        found.append(text[position:end])
        position = skip_blanks(text, end)
        if text[position] == ",":
            position = skip_blanks(text, position + 1)
    return found


def call_of(text: str) -> WrittenCall:
    """Read an object with the name of a function and its arguments, which may be JSON text of an object, too.

    `{"type": "function", "function": {...}}` around it is taken off. Arguments that are missing are an empty object.

    Raises:
        MalformedCallError: It is no such object.
    """
    found = members(text)
    if "name" not in found and "function" in found:
        found = members(found["function"])
    name = load(found.get("name", "null"))
    if not isinstance(name, str) or not name:
        raise MalformedCallError
    return WrittenCall(name, _arguments(next((found[key] for key in _ARGUMENT_KEYS if key in found), "{}")))


def _arguments(text: str) -> str:
    value = load(text)
    if isinstance(value, str):
        text, value = value, load(value)
    if not isinstance(value, dict):
        raise MalformedCallError
    return text


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")
