"""Read server-sent events out of bytes that arrive in any pieces."""

from __future__ import annotations


class EventParser:
    """Collects bytes and gives the data of every event that has ended, however the bytes were cut.

    Lines end in LF or CRLF; fields other than `data` and comments are skipped.

    Source: WHATWG HTML, "Server-sent events", event stream interpretation.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[str]:
        """Return the data of the events that `chunk` completes, in order. O(chunk) unless one line spans many chunks."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        events = []
        for line in lines:
            event = self._line(line.removesuffix(b"\r"))
            if event is not None:
                events.append(event)
        return events

    def _line(self, line: bytes) -> str | None:
        """Take a line; returns an event's data if the line ends it."""
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" ").decode("utf-8", "replace"))
        if line or not self._data:
            return None
        data, self._data = "\n".join(self._data), []
        return data
