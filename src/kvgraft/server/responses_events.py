"""Items of a response, and the events that report them as they come."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from kvgraft.server.tools import CallArguments, CallBegin, Content

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvgraft.server.answer import JSONObject
    from kvgraft.server.tools import Piece

_TEXT_PART: dict[str, object] = {"type": "output_text", "annotations": [], "logprobs": []}


class ResponseItems:
    """The output of one response: messages and function calls in the order of the text.

    Attributes:
        output: The items so far, as they stand in a response.
    """

    def __init__(self) -> None:
        self.output: list[JSONObject] = []
        self._text = ""
        self._is_open = False

    def take(self, pieces: Iterable[Piece]) -> list[JSONObject]:
        """Add what was read; returns the events that report it, without their numbers."""
        events: list[JSONObject] = []
        for piece in pieces:
            match piece:
                case Content():
                    events += self._add_text(piece.text)
                case CallBegin():
                    events += self._begin_call(piece)
                case CallArguments():
                    self._text += piece.text
                    events.append(self._event("response.function_call_arguments.delta", delta=piece.text))
        return events

    def end(self, *, is_whole: bool) -> list[JSONObject]:
        """Close the last item; a response without any gets an empty message. Returns the events that report it."""
        events = [] if self.output else self._begin_message()
        return events + self._close("completed" if is_whole else "incomplete")

    def _add_text(self, text: str) -> list[JSONObject]:
        events: list[JSONObject] = []
        if not (self._is_open and self._is_message):
            events = self._close("completed") + self._begin_message()
        self._text += text
        return [*events, self._event("response.output_text.delta", content_index=0, delta=text, logprobs=[])]

    def _begin_message(self) -> list[JSONObject]:
        item: JSONObject = {"type": "message", "role": "assistant", "content": []}
        begun = self._begin("msg_", item)
        part = {**_TEXT_PART, "text": ""}
        return [*begun, self._event("response.content_part.added", content_index=0, part=part)]

    def _begin_call(self, piece: CallBegin) -> list[JSONObject]:
        item: JSONObject = {"type": "function_call", "call_id": piece.call_id, "name": piece.name, "arguments": ""}
        return self._close("completed") + self._begin("fc_", item)

    def _begin(self, prefix: str, item: JSONObject) -> list[JSONObject]:
        self.output.append({"id": prefix + uuid.uuid4().hex, "status": "in_progress", **item})
        self._text, self._is_open = "", True
        return [self._item_event("response.output_item.added")]

    def _close(self, status: str) -> list[JSONObject]:
        if not self._is_open:
            return []
        self._is_open = False
        item = self.output[-1]
        item["status"] = status
        if self._is_message:
            part = {**_TEXT_PART, "text": self._text}
            item["content"] = [part]
            events = [
                self._event("response.output_text.done", content_index=0, text=self._text, logprobs=[]),
                self._event("response.content_part.done", content_index=0, part=part),
            ]
        else:
            item["arguments"] = self._text
            done = self._event("response.function_call_arguments.done", name=item["name"], arguments=self._text)
            events = [done]
        return [*events, self._item_event("response.output_item.done")]

    @property
    def _is_message(self) -> bool:
        return self.output[-1]["type"] == "message"

    def _event(self, kind: str, **facts: object) -> JSONObject:
        """An event about a part of the last item."""
        return {"type": kind, "item_id": self.output[-1]["id"], "output_index": len(self.output) - 1, **facts}

    def _item_event(self, kind: str) -> JSONObject:
        """An event with the last item as it is now."""
        return {"type": kind, "output_index": len(self.output) - 1, "item": dict(self.output[-1])}
