"""Figures of the last hour for the page's curves: who opens it behind an incident sees what led there."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvgraft.inspector.state import state_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from kvgraft.inspector.source import Source

logger = logging.getLogger(__name__)

_PERIOD_S = 5.0
_MOST_POINTS = 720
"""An hour of them."""


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

    def told(self) -> dict[str, Any]:
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

    def told(self) -> list[dict[str, Any]]:
        """All points in types that JSON has."""
        return [point.told() for point in self._points]


@asynccontextmanager
async def followed(source: Source | None, period_s: float = _PERIOD_S) -> AsyncGenerator[None]:
    """Add to `source.timeline` every `period_s` seconds, for as long as the context lasts; with None do nothing."""
    if source is None:
        yield
        return
    following = asyncio.create_task(_follow(source, period_s))
    try:
        yield
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def _follow(source: Source, period_s: float) -> None:
    """Look until cancelled; a look that fails leaves a gap, of which the log tells the first time."""
    is_told = False
    while True:
        try:
            source.timeline.add(time.time(), state_of(await source.samples()))
        except Exception:
            if not is_told:
                logger.exception("the page's curves have gaps: figures could not be read")
            is_told = True
        await asyncio.sleep(period_s)
