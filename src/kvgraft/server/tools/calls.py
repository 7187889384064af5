"""Pieces that a reader makes of an output: content and calls."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvgraft.server.tools.base import WrittenCall


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user.

    Attributes:
        text: What is new of it; not empty.
    """

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call begins.

    Attributes:
        index: Its number in the answer, from 0.
        call_id: Its id, `call_...`.
        name: Of the function.
    """

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of a call.

    Attributes:
        index: Number of the call.
        text: What is new of their JSON text; not empty.
    """

    index: int
    text: str


Piece = Content | CallBegin | CallArguments


@dataclass(slots=True, eq=False)
class ToolCall:
    """A call as far as it is known."""

    call_id: str
    name: str
    arguments: str = ""


@dataclass(slots=True, eq=False)
class ReadOutput:
    """The sum of pieces.

    Attributes:
        content: All text for the user.
        calls: The calls, in order.
    """

    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, pieces: Iterable[Piece]) -> None:
        """Append pieces."""
        for piece in pieces:
            match piece:
                case Content():
                    self.content += piece.text
                case CallBegin():
                    self.calls.append(ToolCall(piece.call_id, piece.name))
                case CallArguments():
                    self.calls[piece.index].arguments += piece.text


class OutputReader(ABC):
    """Reads one output as it comes. Not thread-safe."""

    @abstractmethod
    def feed(self, text: str) -> list[Piece]:
        """Take more of the output; returns what has become certain."""

    @abstractmethod
    def finish(self) -> list[Piece]:
        """Take the end of the output; returns the rest."""


def new_call_id() -> str:
    """Return the id of a new call."""
    return f"call_{uuid.uuid4().hex[:24]}"


def pieces_of(index: int, call: WrittenCall) -> list[Piece]:
    """Return a call that is known as a whole."""
    return [CallBegin(index, new_call_id(), call.name), CallArguments(index, call.arguments)]
