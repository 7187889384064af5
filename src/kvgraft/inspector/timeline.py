"""Figures of the last hour for the page's curves: opened after an incident, it shows what led there."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_MOST_POINTS = 720
"""An hour of them, one every `following.PERIOD_S`."""


@dataclass(frozen=True, slots=True)
class Point:
    """Figures of a moment.

    Attributes:
        at: Unix time in seconds.
        tokens: Prompt tokens since the server's start, by how they came about.
        slots: K/V slots by holder.
    """

    at: float
    tokens: Mapping[str, float]
    slots: Mapping[str, float]

    def as_dict(self) -> dict[str, Any]:
        """In types that JSON has."""
        return {"at": self.at, "tokens": dict(self.tokens), "slots": dict(self.slots)}


class Timeline:
    """The last points, the oldest first; lives on one event loop. `add` is O(1)."""

    def __init__(self, limit: int = _MOST_POINTS) -> None:
        self._points: deque[Point] = deque(maxlen=limit)

    def add(self, at: float, state: Mapping[str, Any]) -> None:
        """Keep what `state_of` found, unless it found neither tokens nor slots: a server that does not answer has none."""
        if "tokens" in state or "slots" in state:
            self._points.append(Point(at, state.get("tokens", {}), state.get("slots", {})))

    def as_dicts(self) -> list[dict[str, Any]]:
        """All points in types that JSON has."""
        return [point.as_dict() for point in self._points]
