"""Read an output that a structure has made calls of: their arguments are passed on as they are written."""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING

from kvgraft.server.tools.calls import CallArguments, CallBegin, Content, OutputReader, Piece, new_call_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgraft.server.tools.base import CallLayout


class _Section(Enum):
    """Parts of an output, one after another."""

    HEAD = auto()
    ARGUMENTS = auto()
    TAIL = auto()
    TEXT = auto()


class ForcedReader(OutputReader):
    """Calls in a layout, and nothing else; or something else, which is content.

    What stands before the arguments of a call is known, so they need not be awaited. An output that ends too early ends in
    arguments that end too early.
    """

    def __init__(self, layout: CallLayout, names: Sequence[str]) -> None:
        self._layout = layout
        self._names = names
        self._held = ""
        self._num_calls = 0
        self._section = _Section.HEAD
        self._value = _OpenValue()

    def feed(self, text: str) -> list[Piece]:
        """Take more of the output; returns what has become certain."""
        self._held += text
        pieces: list[Piece] = []
        while self._held and self._step(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        """Take the end of the output; a beginning that nothing came of is content."""
        held, self._held = self._held, ""
        layout = self._layout
        rests = (layout.after + layout.separator, layout.after + layout.closing, layout.separator, layout.closing)
        is_rest = self._num_calls > 0 and any(rest.startswith(held) for rest in rests)
        return [Content(held)] if held and not is_rest else []

    def _step(self, pieces: list[Piece]) -> bool:
        """Take a part of what is held; returns whether that was possible."""
        match self._section:
            case _Section.HEAD:
                return self._take_head(pieces)
            case _Section.ARGUMENTS:
                end = self._value.end_in(self._held)
                pieces.append(CallArguments(self._num_calls - 1, self._held[:end]))
                self._held = "" if end is None else self._held[end:]
                self._section = _Section.ARGUMENTS if end is None else _Section.TAIL
                return True
            case _Section.TAIL:
                return self._take_tail()
            case _Section.TEXT:
                pieces.append(Content(self._held))
                self._held = ""
                return True

    def _take_head(self, pieces: list[Piece]) -> bool:
        layout = self._layout
        front = layout.separator if self._num_calls else layout.opening
        heads = {front + layout.before_arguments(name): name for name in self._names}
        for head, name in heads.items():
            if self._held.startswith(head):
                pieces.append(CallBegin(self._num_calls, new_call_id(), name))
                self._num_calls += 1
                self._held = self._held[len(head) :]
                self._section, self._value = _Section.ARGUMENTS, _OpenValue()
                return True
        closings = [layout.closing] if self._num_calls and layout.closing else []
        if any(text.startswith(self._held) for text in (*heads, *closings)):
            return False
        self._section = _Section.TEXT
        return True

    def _take_tail(self) -> bool:
        after = self._layout.after
        if self._held.startswith(after):
            self._held, self._section = self._held[len(after) :], _Section.HEAD
            return True
        if after.startswith(self._held):
            return False
        self._section = _Section.TEXT
        return True


class _OpenValue:
    """Follows an object or a list of JSON to its end."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def end_in(self, text: str) -> int | None:
        """Return where in `text`, which goes on with the value, it ends; None if it does not."""
        for index, character in enumerate(text):
            if self._in_string:
                self._follow_string(character)
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return index + 1
        return None

    def _follow_string(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._in_string = False
