"""Cuts of a stream of server-sent events where events end, as far as that can be done in bounded memory. No I/O."""

from __future__ import annotations

_ENDS = (b"\n\n", b"\r\n\r\n")
_LONGEST_END = max(map(len, _ENDS))
_MOST_HELD = 1 << 16
"""Bytes of an unfinished event that are kept back, so that an event that breaks off is not passed on in part."""


class EventCutter:
    """Passes whole events on, and long ones as they come. Complexity: O(bytes).

    Attributes:
        is_inside: Whether a part of an event was passed on and its rest is still to come.
    """

    def __init__(self) -> None:
        self.is_inside = False
        self._held = bytearray()
        self._before = b""

    def take(self, chunk: bytes) -> bytes:
        """Return what can be passed on now that `chunk` has come; it is followed by what later calls return."""
        seen = self._before + chunk
        cut = max(found + len(end) if (found := seen.rfind(end)) >= 0 else 0 for end in _ENDS) - len(self._before)
        self._before = seen[1 - _LONGEST_END :]
        if cut > 0:
            whole = self.rest() + chunk[:cut]
            self._held += chunk[cut:]
            self.is_inside = False
            return whole
        self._held += chunk
        self.is_inside = self.is_inside or len(self._held) > _MOST_HELD
        return self.rest() if self.is_inside else b""

    def rest(self) -> bytes:
        """Return what was kept back: the stream has ended."""
        held = bytes(self._held)
        self._held.clear()
        return held
