"""Calls of Llama 3: `{"name": ..., "parameters": {...}}`, with or without `<|python_tag|>` in front."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.server.tools.base import CallLayout, MalformedCallError, ReadCalls, ToolFormat
from kvgraft.server.tools.generic import may_be_call
from kvgraft.server.tools.json_text import call_of, end_of_value, skip_blanks

if TYPE_CHECKING:
    from collections.abc import Collection

_TAG = "<|python_tag|>"


class LlamaFormat(ToolFormat):
    """An object per call, several with semicolons between them. Without the tag it has to name a function of the request.

    Source: https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1, "JSON based tool calling".
    """

    markers = (_TAG, "{")
    layout = CallLayout(before='{"name": "{name}", "parameters": ', after="}", separator="; ")
    between = ";"

    def read(self, text: str, names: Collection[str], *, is_whole: bool) -> ReadCalls | None:
        """Read one call."""
        is_tagged = text.startswith(_TAG)
        start = skip_blanks(text, len(_TAG)) if is_tagged else 0
        if not may_be_call(text, start):
            raise MalformedCallError
        end = end_of_value(text, start)
        if end is None:
            return None
        call = call_of(text[start:end])
        if not is_tagged and call.name not in names:
            raise MalformedCallError
        return ReadCalls(end, (call,))
