"""Spans of stored donors that are being read for a request, which waits in SGLang's queue meanwhile."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from kvgraft.errors import StoreError, StoreMissError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvgraft.donors import Donor
    from kvgraft.memory.block import KVBlock
    from kvgraft.memory.store.tier import Fetch
    from kvgraft.types import Miss


class ReadState(IntEnum):
    """What has become of a read; of ranks that read their parts of it the lowest counts."""

    LOST = 0
    """The store has the donor no more."""
    FAILED = 1
    """It failed otherwise."""
    PENDING = 2
    THERE = 3


class SharedFetch:
    """A read that requests share; it is given up when the last of them goes. Not thread-safe."""

    def __init__(self, fetch: Fetch) -> None:
        self.fetch = fetch
        self._num_users = 0

    def join(self) -> SharedFetch:
        """Count one more that waits for it."""
        self._num_users += 1
        return self

    def leave(self) -> None:
        """Count one less."""
        self._num_users -= 1
        if not self._num_users and not self.fetch.is_done:
            self.fetch.cancel()


@dataclass(frozen=True, slots=True, eq=False)
class SpanRead:
    """A part of a donor that is being read.

    Attributes:
        donor: As `ColdDonors.get` gives it; None if this rank does not know it.
        place: Number of its store.
        start: First token in the donor.
        length: Number of tokens.
        shared: What reads it, counted once for this request; None for nothing.
    """

    donor: Donor | None
    place: int
    start: int
    length: int
    shared: SharedFetch | None

    @property
    def fetch(self) -> Fetch | None:
        """What reads it; None for nothing."""
        return None if self.shared is None else self.shared.fetch

    @property
    def state(self) -> ReadState:
        """What has become of it on this rank."""
        if self.donor is None or self.fetch is None:
            return ReadState.LOST
        if not self.fetch.is_done:
            return ReadState.PENDING
        try:
            self.fetch.block()
        except StoreMissError:
            return ReadState.LOST
        except StoreError:
            return ReadState.FAILED
        return ReadState.THERE

    def block(self) -> KVBlock:
        """The K/V, once the state is `THERE`."""
        assert self.fetch is not None
        return self.fetch.block()


class SpanReads:
    """The reads of one request.

    Attributes:
        reads: They.
        begun: When they began.
        deadline: What is not there then is computed.
        miss: Why not all of them were of use; None before they are over, or if all were.
    """

    def __init__(
        self, reads: Sequence[SpanRead], patience_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Take reads that have begun.

        Args:
            reads: They.
            patience_s: Longest time that the request waits for them.
            clock: Seconds.
        """
        self.reads = tuple(reads)
        self.miss: Miss | None = None
        self._clock = clock
        self._is_cancelled = False
        self.begun = clock()
        self.deadline = self.begun + patience_s

    @property
    def is_late(self) -> bool:
        """Whether the deadline has passed."""
        return self._clock() >= self.deadline

    def states(self) -> list[int]:
        """Of every read on this rank."""
        return [int(read.state) for read in self.reads]

    def wait(self, timeout_s: float) -> None:
        """Wait a moment for the first one that is missing."""
        pending = next((read.fetch for read in self.reads if read.fetch and not read.fetch.is_done), None)
        if pending is not None:
            pending.wait(timeout_s)

    def cancel(self) -> None:
        """Say that the request does not want them any more; others that share one may."""
        if self._is_cancelled:
            return
        self._is_cancelled = True
        for read in self.reads:
            if read.shared is not None:
                read.shared.leave()
