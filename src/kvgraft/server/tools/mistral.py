"""Calls of Mistral: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}]`, and the newer `[TOOL_CALLS]name[ARGS]{...}`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, cast

from kvgraft.server.tools.base import CallLayout, MalformedCallError, ReadCalls, ToolFormat, WrittenCall
from kvgraft.server.tools.json_text import call_of, end_of_value, items, load, skip_blanks

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvgraft.http.messages import Message

_BEGIN, _ARGS, _CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_ID_CHARS = 9
_HEAD = re.compile(rf"([\w.\-]+)(?:{re.escape(_CALL_ID)}\w+)?(?:{re.escape(_ARGS)})?\s*")


class MistralFormat(ToolFormat):
    """A list of all calls after one mark, or each call after its own; both are read.

    Source: https://docs.mistral.ai/capabilities/function_calling, and the templates of the models.

    Args:
        is_named: The model writes the newer form; forced calls are laid out in it.
    """

    markers = (_BEGIN,)

    def __init__(self, *, is_named: bool = False) -> None:
        self.layout = (
            CallLayout(before=f"{_BEGIN}{{name}}{_ARGS}", mark=_BEGIN)
            if is_named
            else CallLayout(
                opening=f"{_BEGIN} [",
                before='{"name": "{name}", "arguments": ',
                after="}",
                separator=", ",
                closing="]",
                mark=_BEGIN,
            )
        )

    def read(self, text: str, names: Collection[str], *, is_whole: bool) -> ReadCalls | None:
        """Read the list after the mark, or the one call."""
        start = skip_blanks(text, len(_BEGIN))
        if start == len(text):
            return None
        if text[start] in "[{":
            return _listed(text, start)
        return _named(text, start)

    def template_message(self, message: Message) -> Message:
        """Return a message with ids of calls of nine letters and digits, which these templates insist on."""
        changed = dict(message)
        if isinstance(message.get("tool_call_id"), str):
            changed["tool_call_id"] = _short_id(str(message["tool_call_id"]))
        if message.get("tool_calls"):
            calls = cast("list[Message]", message["tool_calls"])
            changed["tool_calls"] = [{**call, "id": _short_id(str(call.get("id", "")))} for call in calls]
        return changed


def _listed(text: str, start: int) -> ReadCalls | None:
    end = end_of_value(text, start)
    if end is None:
        return None
    written = text[start:end]
    return ReadCalls(end, tuple(call_of(item) for item in (items(written) if written[0] == "[" else [written])))


def _named(text: str, start: int) -> ReadCalls | None:
    head = _HEAD.match(text, start)
    if head is None:
        raise MalformedCallError
    rest = text[head.end() :]
    if rest.startswith("{"):
        end = end_of_value(text, head.end())
        if end is None:
            return None
        load(text[head.end() : end])
        return ReadCalls(end, (WrittenCall(head[1], text[head.end() : end]),))
    if not rest or any(mark.startswith(rest) for mark in (_CALL_ID, _ARGS)):
        return None
    raise MalformedCallError


def _short_id(call_id: str) -> str:
    return re.sub("[^A-Za-z0-9]", "", call_id)[-_ID_CHARS:].rjust(_ID_CHARS, "0")
