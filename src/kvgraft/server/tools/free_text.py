"""Find calls in an output that may hold anything."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvgraft.server.tools.base import MalformedCallError
from kvgraft.server.tools.calls import Content, OutputReader, Piece, pieces_of
from kvgraft.server.tools.json_text import skip_blanks

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvgraft.server.tools.base import ReadCalls, ToolFormat

_QUICK_CHARS = 256
"""So much held text is looked at with each token."""
_ENDS = frozenset("}]>")
_MOST_MALFORMED = 32
"""So many calls of an output may be broken, each of which is read to the end of it; what follows is text."""


class FreeTextReader(OutputReader):
    """Calls amid text, in the form of a model.

    A call is reported when all of it is there: only then is it known to be one. Text that may be its beginning is held back
    until then, and is content if it was none; other text goes out at once. White space around calls goes with them.
    However the output is cut, the same comes out.
    """

    def __init__(
        self,
        tool_format: ToolFormat,
        names: Collection[str],
        *,
        is_parallel: bool = True,
        is_laid_out: bool = False,
        withheld: Collection[str] = (),
    ) -> None:
        """Begin an output.

        Args:
            tool_format: How calls are written.
            names: Functions of the request.
            is_parallel: Several calls are reported; otherwise what follows the first one is left out.
            is_laid_out: Calls are forced ones, in the layout of the format; what else looks like a call is content.
            withheld: Functions that are shown and may not be called: calls of them are content.
        """
        self._format = tool_format
        self._names = names
        self._is_parallel = is_parallel
        self._is_laid_out = is_laid_out
        self._withheld = withheld
        self._gap = re.compile(rf"\s*(?:{re.escape(tool_format.between)})?\s*")
        self._held = ""
        self._num_calls = self._num_malformed = 0
        self._is_behind_call = False

    def feed(self, text: str) -> list[Piece]:
        """Take more of the output; returns what has become certain."""
        is_long = len(self._held.lstrip()) > _QUICK_CHARS
        self._held += text
        if is_long and _ENDS.isdisjoint(text):  # a long call goes on; to look again at each token would cost its square
            return []
        return self._read(is_whole=False)

    def finish(self) -> list[Piece]:
        """Take the end of the output; returns the rest."""
        return self._read(is_whole=True)

    def _read(self, *, is_whole: bool) -> list[Piece]:
        pieces: list[Piece] = []
        while self._held:
            if self._num_calls and not self._is_parallel:
                self._held = ""
                break
            if self._num_malformed == _MOST_MALFORMED:
                self._give(pieces, len(self._held))
                break
            self._take_text(pieces, is_whole=is_whole)
            start = self._gap_length()
            if not self._held.startswith(self._format.markers, start):
                break
            try:
                found = self._found(start, is_whole=is_whole)
            except MalformedCallError:
                self._num_malformed += 1
                self._give(pieces, start + 1)
                continue
            if found is None:
                break
            self._take_calls(pieces, found)
            self._held = self._held[start + found.length :]
        return _joined(pieces)

    def _take_text(self, pieces: list[Piece], *, is_whole: bool) -> None:
        """Give what cannot belong to a call: all before a marker, but for a gap that may go with the call."""
        end = self._first_marker(is_whole=is_whole)
        text = self._held[:end]
        if is_whole and end == len(self._held):
            self._give(pieces, end)
        elif not (self._is_behind_call and self._gap_length() >= end):
            self._give(pieces, len(text.rstrip()))

    def _first_marker(self, *, is_whole: bool) -> int:
        """Return where the first marker begins, or what may become one; the end if there is neither."""
        held, markers = self._held, self._format.markers
        found = [position for marker in markers if (position := held.find(marker)) >= 0]
        if found or is_whole:
            return min(found, default=len(held))
        longest = max(map(len, markers)) - 1
        tails = range(max(0, len(held) - longest), len(held))
        return next((at for at in tails if any(m.startswith(held[at:]) for m in markers)), len(held))

    def _gap_length(self) -> int:
        """Characters at the beginning that go with a call, if one follows."""
        if not self._is_behind_call:
            return skip_blanks(self._held)
        found = self._gap.match(self._held)
        assert found is not None
        return found.end()

    def _found(self, start: int, *, is_whole: bool) -> ReadCalls | None:
        found = self._format.read(self._held[start:], self._names, is_whole=is_whole)
        if found is None:
            if is_whole:
                raise MalformedCallError
            return None
        is_forced = not self._is_laid_out or self._format.layout.begins(self._held[start:], self._names)
        is_allowed = all(call.name not in self._withheld for call in found.calls)
        if not (found.calls and is_forced and is_allowed):
            raise MalformedCallError
        return found

    def _give(self, pieces: list[Piece], length: int) -> None:
        """Give characters as content; white space after a call is left out."""
        text, self._held = self._held[:length], self._held[length:]
        text = text.lstrip() if self._is_behind_call else text
        if text:
            self._is_behind_call = False
            pieces.append(Content(text))

    def _take_calls(self, pieces: list[Piece], found: ReadCalls) -> None:
        for call in found.calls if self._is_parallel else found.calls[:1]:
            pieces += pieces_of(self._num_calls, call)
            self._num_calls += 1
        self._is_behind_call = True


def _joined(pieces: list[Piece]) -> list[Piece]:
    joined: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, Content) and joined and isinstance(joined[-1], Content):
            joined[-1] = Content(joined[-1].text + piece.text)
        else:
            joined.append(piece)
    return joined
