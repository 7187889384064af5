"""Calls of Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.server.tools.base import CallLayout, MalformedCallError, ReadCalls, ToolFormat
from kvgraft.server.tools.json_text import call_of, end_of_value, skip_blanks

if TYPE_CHECKING:
    from collections.abc import Collection

_BEGIN, _END = "<tool_call>", "</tool_call>"


class HermesFormat(ToolFormat):
    """An object between two tags per call. Source: https://github.com/NousResearch/Hermes-Function-Calling."""

    markers = (_BEGIN,)
    layout = CallLayout(
        before=_BEGIN + '\n{"name": "{name}", "arguments": ', after="}\n" + _END, separator="\n", mark=_BEGIN
    )

    def read(self, text: str, names: Collection[str], *, is_whole: bool) -> ReadCalls | None:
        """Read one call. At the end of the output the closing tag may be missing: it may be a stop text."""
        start = skip_blanks(text, len(_BEGIN))
        if start < len(text) and text[start] != "{":
            raise MalformedCallError
        end = end_of_value(text, start)
        if end is None:
            return None
        call = call_of(text[start:end])
        tag = skip_blanks(text, end)
        if text.startswith(_END, tag):
            return ReadCalls(tag + len(_END), (call,))
        if not _END.startswith(text[tag:]):
            raise MalformedCallError
        return ReadCalls(len(text), (call,)) if is_whole else None
