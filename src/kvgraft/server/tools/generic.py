"""Calls as bare JSON: an object with `name` and `arguments`, or a list of such."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.server.tools.base import CallLayout, MalformedCallError, ReadCalls, ToolFormat
from kvgraft.server.tools.json_text import call_of, end_of_value, items, skip_blanks

if TYPE_CHECKING:
    from collections.abc import Collection

_FIRST_KEYS = ('"name"', '"type"', '"function"', '"arguments"', '"parameters"')


class JsonFormat(ToolFormat):
    """Objects without marks around them, for models that were trained for no form of calls.

    Other JSON is no call: the object has to name a function of the request.
    """

    markers = ("{", "[")
    layout = CallLayout(before='{"name": "{name}", "arguments": ', after="}", separator="\n")

    def read(self, text: str, names: Collection[str], *, is_whole: bool) -> ReadCalls | None:
        """Read an object, or a list of objects."""
        start = 0 if text[0] == "{" else skip_blanks(text, 1)
        if not may_be_call(text, start):
            raise MalformedCallError
        end = end_of_value(text, 0)
        if end is None:
            return None
        whole = text[:end]
        calls = tuple(call_of(item) for item in (items(whole) if start else [whole]))
        if not all(call.name in names for call in calls):
            raise MalformedCallError
        return ReadCalls(end, calls)


def may_be_call(text: str, start: int) -> bool:
    """Return whether an object at `start` may turn out to be a call: its first key is one that calls begin with."""
    if start == len(text):
        return True
    if text[start] != "{":
        return False
    key = text[skip_blanks(text, start + 1) :]
    return any(key.startswith(first) or first.startswith(key) for first in _FIRST_KEYS)
