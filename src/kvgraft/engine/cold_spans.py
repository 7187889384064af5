"""Spans of a plan whose K/V are read from a store while other requests run: begun at once, awaited by nobody for long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvgraft.donors import Donor
    from kvgraft.engine.request import Request
    from kvgraft.memory.store.tier import Fetch
    from kvgraft.types import Match


@dataclass(slots=True, eq=False)
class ColdSpan:
    """One span on its way.

    Attributes:
        match: The span.
        donor: As it was planned, with a `StoredKV`.
        store: Number of the store that is read.
        fetch: The read.
        is_copied: Whether its K/V lie in the request's slots.
        is_over: Whether nothing more will come of it.
    """

    match: Match
    donor: Donor
    store: int
    fetch: Fetch
    is_copied: bool = False
    is_over: bool = False


class ColdReads:
    """The reads of one request. Not thread-safe; the fetches are."""

    def __init__(
        self, request: Request, spans: Sequence[ColdSpan], patience_s: float, clock: Callable[[], float]
    ) -> None:
        """Take reads that have begun.

        Args:
            request: As it was before its plan was made.
            spans: At least one.
            patience_s: What has not come by then is computed.
            clock: Seconds.
        """
        self.request = request
        self.spans = tuple(spans)
        self._clock = clock
        self._began = clock()
        self._deadline = self._began + patience_s

    @property
    def is_late(self) -> bool:
        """Whether the time is up."""
        return self._clock() >= self._deadline

    @property
    def is_settled(self) -> bool:
        """Whether nothing is awaited any more."""
        return all(span.is_over for span in self.spans)

    @property
    def elapsed_ms(self) -> float:
        """Milliseconds since the reads began."""
        return (self._clock() - self._began) * 1e3

    def arrivals(self) -> list[ColdSpan]:
        """Spans whose read has ended since the last call, well or badly."""
        return [span for span in self.spans if not span.is_over and span.fetch.is_done]

    def pending(self) -> list[ColdSpan]:
        """Spans that are still awaited."""
        return [span for span in self.spans if not span.is_over]

    def wait(self, timeout_s: float) -> None:
        """Wait until the next span is there or the time is up, for at most `timeout_s`. For when nothing else is to do."""
        for span in self.pending()[:1]:
            span.fetch.wait(max(0.0, min(timeout_s, self._deadline - self._clock())))

    def cancel(self) -> None:
        """Let go of what is still awaited."""
        for span in self.pending():
            span.fetch.cancel()
            span.is_over = True
