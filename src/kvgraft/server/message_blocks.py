"""Content blocks of a message of Anthropic's API, and the events that report them as they come."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from kvgraft.server.tools import CallArguments, CallBegin, Content

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvgraft.server.answer import JSONObject
    from kvgraft.server.tools import Piece


class MessageBlocks:
    """The content of one message: texts and calls, in the order of the output.

    Attributes:
        content: The blocks so far, as they stand in a message.
        has_calls: One of them is a call.
    """

    def __init__(self) -> None:
        self.content: list[JSONObject] = []
        self.has_calls = False
        self._text = ""
        self._is_open = False

    def take(self, pieces: Iterable[Piece]) -> list[JSONObject]:
        """Add what was read; returns the events that report it."""
        events: list[JSONObject] = []
        for piece in pieces:
            match piece:
                case Content():
                    if not (self._is_open and self.content[-1]["type"] == "text"):
                        events += self._begin({"type": "text", "text": ""})
                    events.append(self._delta({"type": "text_delta", "text": piece.text}, piece.text))
                case CallBegin():
                    self.has_calls = True
                    call_id = "toolu_" + piece.call_id.removeprefix("call_")
                    events += self._begin({"type": "tool_use", "id": call_id, "name": piece.name, "input": {}})
                case CallArguments():
                    events.append(self._delta({"type": "input_json_delta", "partial_json": piece.text}, piece.text))
        return events

    def end(self) -> list[JSONObject]:
        """Close the last block; returns the event that reports it, if there is a block."""
        if not self._is_open:
            return []
        self._is_open = False
        block = self.content[-1]
        if block["type"] == "text":
            block["text"] = self._text
        else:
            block["input"] = _arguments(self._text)
        return [{"type": "content_block_stop", "index": len(self.content) - 1}]

    def _begin(self, block: JSONObject) -> list[JSONObject]:
        events = self.end()
        self.content.append(block)
        self._text, self._is_open = "", True
        return [*events, {"type": "content_block_start", "index": len(self.content) - 1, "content_block": dict(block)}]

    def _delta(self, delta: JSONObject, text: str) -> JSONObject:
        self._text += text
        return {"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta}


def _arguments(text: str) -> JSONObject:
    """Return the arguments of a call as an object; none of one that was cut off."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
