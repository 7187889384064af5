"""Reads of stored donors: what they cost, how long a request waits for them, and why it went without. No I/O."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from statistics import median
from typing import TYPE_CHECKING, Protocol

from kvgraft.errors import StoreError, StoreMissError
from kvgraft.types import Miss, MissReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvgraft.donors import Donor
    from kvgraft.reuse.stored_donors import StoredDonors
    from kvgraft.types import Match

_TIMES_EXPECTED, _LEAST_PATIENCE_S = 4, 0.5
"""A read may take so many times what it is expected to take, and never less than this: stores stutter, machines are busy."""
_SHARE_OF_COMPUTING, _SHARE_AT_MOST_S = 4, 5.0
"""And a fourth of the time of computing, up to this: to give up a moment too early costs all of that."""
_MOST_PATIENCE_S = 30.0
_LEAST_COST = 0.1
"""Cost of reading a token at least, where a token's computing costs 1: text that is resident goes first."""
_REMEMBERED_PREFILLS = 9
_FEWEST_TOKENS = 64
"""A shorter prefill takes as long as a step takes, however few its tokens."""


class PrefillSpeed:
    """Speed of an engine's prefill: the median of the last ones. Not thread-safe."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_REMEMBERED_PREFILLS)

    @property
    def per_s(self) -> float | None:
        """Cost that is computed per second, in the unit of the cost model; None before anything was observed."""
        return median(self._recent) if self._recent else None

    def observe(self, num_tokens: int, cost: float, seconds: float) -> None:
        """Take a prefill of `num_tokens` that took `seconds`; one of few tokens is ignored."""
        if num_tokens >= _FEWEST_TOKENS and cost > 0 and seconds > 0:
            self._recent.append(cost / seconds)


class ReadTerms:
    """The price of reading from stores, in cost and in time. Changes nothing."""

    def __init__(
        self,
        stored: StoredDonors,
        expected_s: Callable[[int, int], float],
        speed: Callable[[], float | None],
        *,
        most_tokens: float = math.inf,
    ) -> None:
        """Set the terms.

        Args:
            stored: Knows which donors stores hold.
            expected_s: Seconds to read a span, by store and number of tokens; infinite of a store that is left alone.
            speed: Cost that the engine computes per second; None while it is not known: reading is taken for faster then.
            most_tokens: Longest span that can be read.
        """
        self._stored = stored
        self._expected_s = expected_s
        self._speed = speed
        self._most_tokens = most_tokens

    def cost(self, match: Match) -> float:
        """Return the cost of what could be computed while a match is read: 0 of a resident one, above 0 of a stored one.

        That of a stored one is infinite if it cannot be read; see `plan_graft`.
        """
        if not self._stored.is_read(match):
            return 0.0
        seconds, speed = self.expected_s(match), self._speed()
        if math.isinf(seconds) or match.length > self._most_tokens:
            return math.inf
        return max(_LEAST_COST * match.length, 0.0 if speed is None else seconds * speed)

    def expected_s(self, match: Match) -> float:
        """Return the seconds until a stored match is read; infinite if no store gives it."""
        store = self._stored.holder_of(match.donor_id)
        return math.inf if store is None else self._expected_s(store, match.length)

    def patience_s(self, matches: Iterable[Match], cost: float) -> float:
        """Return the longest time that a request waits for reads.

        Args:
            matches: That are read. Of a store that is left alone by now nothing is expected: it refuses at once.
            cost: Of computing them instead; it never waits for longer than that takes.
        """
        expected_s = sum(seconds for match in matches if math.isfinite(seconds := self.expected_s(match)))
        speed = self._speed()
        compute_s = math.inf if speed is None else cost / speed
        share_s = 0.0 if speed is None else min(compute_s / _SHARE_OF_COMPUTING, _SHARE_AT_MOST_S)
        return min(max(_LEAST_PATIENCE_S, _TIMES_EXPECTED * expected_s, share_s), compute_s, _MOST_PATIENCE_S)


class ReadState(IntEnum):
    """State of a read; of ranks that read their parts of a donor the lowest counts."""

    LOST = 0
    """The store holds the donor no more."""
    FAILED = 1
    """It failed otherwise."""
    PENDING = 2
    THERE = 3


class Read(Protocol):
    """A read in the background; `memory.store.tier.Fetch` is one."""

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or badly."""

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has ended; False if it takes longer."""

    def cancel(self) -> None:
        """Give it up."""

    def block(self) -> object:
        """Return the K/V once it has ended; raises `StoreError` if it failed."""


@dataclass(slots=True, eq=False)
class StoredSpan:
    """A span that is read for a request.

    Attributes:
        match: The span.
        donor: As it was planned; None if it is not known here.
        store: Number of the store that is read.
        read: None if there is nothing to read.
        is_over: Whether it is awaited no more.
        is_copied: Whether the request has its K/V.
    """

    match: Match
    donor: Donor | None
    store: int
    read: Read | None
    is_over: bool = False
    is_copied: bool = False

    @property
    def state(self) -> ReadState:
        """State of its read."""
        if self.read is None:
            return ReadState.LOST
        if not self.read.is_done:
            return ReadState.PENDING
        try:
            self.read.block()
        except StoreMissError:
            return ReadState.LOST
        except StoreError:
            return ReadState.FAILED
        return ReadState.THERE

    @property
    def is_pending(self) -> bool:
        """Whether the read has not ended."""
        return self.state is ReadState.PENDING


class StoredReads:
    """The reads of one request, and its deadline. Not thread-safe; the reads are.

    Attributes:
        spans: In the order of the prompt.
        deadline: What has not come by then is computed.
        miss: Why not all of them were of use, where their owner notes it.
    """

    def __init__(self, spans: Sequence[StoredSpan], patience_s: float, clock: Callable[[], float]) -> None:
        """Take reads that have begun; what has not come within `patience_s` seconds is computed."""
        self.spans = tuple(spans)
        self.miss: Miss | None = None
        self._clock = clock
        self._began = clock()
        self.deadline = self._began + patience_s

    @property
    def is_late(self) -> bool:
        """Whether the deadline has passed."""
        return self._clock() >= self.deadline

    @property
    def elapsed_ms(self) -> float:
        """Milliseconds since the reads began."""
        return (self._clock() - self._began) * 1e3

    def pending(self) -> list[StoredSpan]:
        """Return the spans that are still awaited."""
        return [span for span in self.spans if not span.is_over]

    def wait(self, timeout_s: float) -> None:
        """Wait until the next read has ended or the deadline has passed, for at most `timeout_s`."""
        reads = (span.read for span in self.pending() if span.read is not None and not span.read.is_done)
        for read in reads:
            read.wait(max(0.0, min(timeout_s, self.deadline - self._clock())))
            return

    def cancel(self) -> None:
        """Give up what is still awaited."""
        for span in self.pending():
            span.is_over = True
            if span.read is not None:
                span.read.cancel()


def store_miss(states: Iterable[ReadState]) -> Miss:
    """Return why a request goes without what it has read, by the last states of its reads; one at least did not come."""
    if ReadState.PENDING in set(states):
        return Miss(MissReason.STORE, "K/V did not come from the store in time")
    return Miss(MissReason.STORE, "the store could not give back what it had")
