"""The stores of one scheduler: what it offers them, what it knows of them, and what it reads.

A space is opened for the weights that are in memory, and closed before they may change. Nothing that other weights computed
is found in it, whatever the model is called.

What fails on one rank raises on all of them, once all have done their part, so that none is left behind in an exchange.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakValueDictionary

from kvgraft.donors.record import StoreNews, space_name
from kvgraft.errors import IntegrationError
from kvgraft.integrations.sglang.stored.reads import ReadState, SharedFetch, SpanRead, SpanReads
from kvgraft.integrations.sglang.stored.speed import PrefillSpeed
from kvgraft.integrations.sglang.stored.write_behind import MAX_QUEUED_BYTES, WriteBehind
from kvgraft.memory.store.tier import UsedStore
from kvgraft.reuse.stored import StoredKV
from kvgraft.types import Fidelity, Miss, MissReason, StoreCounts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvgraft.donors import CostModel
    from kvgraft.integrations.sglang.donors.library import DonorLibrary
    from kvgraft.integrations.sglang.planning.ranks import Ranks
    from kvgraft.integrations.sglang.planning.spans import Span
    from kvgraft.integrations.sglang.stored.cold import ColdDonors
    from kvgraft.memory.store import KVStore, RowLayout
    from kvgraft.types import DonorId, Match

_Result = TypeVar("_Result")

_BUSY_PIECES, _IDLE_PIECES = 16, 8
"""Pieces of K/V that are copied for writing per new request, at most, and per round of an idle scheduler."""
_NEWS_BUSY, _NEWS_IDLE = 16, 64
"""Donors of others that are listed likewise, and in one go of an idle scheduler."""
_IDLE_S = 0.25
"""How long an idle scheduler lists what is new; there is much of it behind a start alone."""
_LEAST_PATIENCE_S = 0.5
_TIMES_EXPECTED = 4
"""A read may take this many times as long as reads usually do, for stores stutter."""
_SHARE_OF_COMPUTING, _MOST_PATIENCE_S = 4, 5.0
"""And it may take a fourth of the time of computing: giving up a moment too early costs all of that."""
_NAP_S = 0.002
"""How long a scheduler that has nothing else to do waits for a read before it looks around again."""


_LATE = Miss(MissReason.DEADLINE, "K/V did not come from the store in time")
_LOST = Miss(MissReason.NO_MATCH, "the store could not give back what it had")


class StoreLink:
    """Not thread-safe. Ranks that serve requests together make the same calls in the same order."""

    def __init__(
        self,
        stores: Sequence[KVStore],
        library: DonorLibrary,
        cold: ColdDonors,
        ranks: Ranks,
        *,
        layout: RowLayout,
        costs: CostModel,
        weights: Callable[[], str],
        host_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare; `open` begins.

        Args:
            stores: In the order in which they are asked.
            library: Donors at hand.
            cold: List of what stores have.
            ranks: Decide together.
            layout: Of this rank's K/V.
            costs: What computing costs.
            weights: Digest of this rank's weights as they are now.
            host_bytes: Host memory for what is read.
            clock: Seconds.
        """
        self.cold, self.costs = cold, costs
        self.prefill = PrefillSpeed()
        self._stores, self._library, self._layout, self._ranks = stores, library, layout, ranks
        self._weights, self._host_bytes, self._clock = weights, host_bytes, clock
        self._digest: str | None = None
        self._behind = WriteBehind(library, cold, ranks, layout.bytes_per_token)
        self._used: list[UsedStore] = []
        self._fetches: WeakValueDictionary[tuple[int, str, int, int], SharedFetch] = WeakValueDictionary()
        self._space = ""
        self.is_open = False

    # The space

    def open(self) -> None:
        """Begin to write, to look and to read in the space of the weights as they are now.

        Raises:
            Exception: It failed here or on another rank; `close` is to follow.
        """
        assert not self.is_open
        if self._digest is None:
            self._digest = self._on_all(self._weights)
        # Of all ranks: one that was given other weights must not be put together with those of before.
        weights = " ".join(self._ranks.gathered(self._digest))
        size = self._ranks.size
        spaces = [
            space_name("sglang", weights, self._layout.description, f"rank {rank} of {size}") for rank in range(size)
        ]
        self._on_all(partial(self._enter, spaces))
        self.is_open = True

    def _enter(self, spaces: Sequence[str]) -> None:
        mine = self._space = spaces[self._ranks.rank]
        looks_into = spaces if self._ranks.rank == 0 else []
        for used in self._used:
            used.enter(mine, self._layout, looks_into)
        for store in self._stores[len(self._used) :]:
            self._used.append(
                UsedStore(
                    store,
                    mine,
                    self._layout,
                    looks_into=looks_into,
                    max_queued_bytes=MAX_QUEUED_BYTES,
                    max_pending_bytes=self._host_bytes,
                    clock=self._clock,
                )
            )
        self._behind.writers = tuple(used.writer for used in self._used)

    def _on_all(self, part: Callable[[], _Result]) -> _Result:
        """Do this rank's part of something, with no exchange in it; if it fails on one rank it raises on all of them."""
        error: Exception | None = None
        try:
            result = part()
        except Exception as raised:  # noqa: BLE001 - raised again when all ranks know
            error = raised
        if self._ranks.lowest([error is None])[0]:
            return result
        raise error or IntegrationError("stores failed on another rank of this server; its log says why")

    def close(self, *, weights_change: bool) -> None:
        """Forget everything that was in the space; what is being written is finished, what waits is not written."""
        if weights_change:
            self._digest = None
        self._behind.writers = ()
        self._behind.donors_reset()
        for used in self._used:
            used.leave()
        self._fetches.clear()
        self.cold.clear()
        self.is_open = False

    def counts(self) -> tuple[StoreCounts, ...]:
        """What came of every store so far."""
        return tuple(used.counts() for used in self._used)

    # Between requests

    def tick(self, num_tokens: int = 0, *, is_idle: bool = False) -> None:
        """Bring what is new into the stores, and into the list what is new in them, some of it at a time.

        Args:
            num_tokens: Of a new request. As many are copied for writing: a small part of what computing them takes, and a
                scheduler that is never idle keeps up.
            is_idle: Whether there is nothing else to do.

        Raises:
            Exception: It failed here or on another rank; `close` is to follow.
        """
        if not self.is_open:
            return
        pieces = _IDLE_PIECES if is_idle else min(_BUSY_PIECES, self._behind.pieces_of(num_tokens))
        self._on_all(partial(self._write, pieces if self._behind.has_room() else 0))
        stop = time.perf_counter() + (_IDLE_S if is_idle else 0.0)
        while self._list(_NEWS_IDLE if is_idle else _NEWS_BUSY, stop):
            pass

    def _write(self, num_pieces: int) -> None:
        self._behind.work(num_pieces)
        for used in self._used:
            used.writer.take_written()  # the next look tells of it, and of what other ranks have

    def _list(self, limit: int, stop: float) -> bool:
        """List some news of the stores, as the first rank tells them; returns whether it has more, and time for it."""
        failed: list[Exception] = []

        def told() -> tuple[list[StoreNews], bool]:
            try:
                news = [used.news(limit) for used in self._used]
            except Exception as error:  # noqa: BLE001 - raised on all ranks below
                failed.append(error)
                return [], False
            return news, any(len(each.added) == limit for each in news) and time.perf_counter() < stop

        everything, has_more = self._ranks.shared(told)
        self._on_all(partial(self._take_news, everything, failed))
        return has_more

    def _take_news(self, everything: Sequence[StoreNews], failed: Sequence[Exception]) -> None:
        for error in failed:
            raise error
        for place, news in enumerate(everything):
            for key in news.removed:
                self.cold.remove(key, place)
            for record in news.added:
                self.cold.add(record, place)

    # Planning

    def worth_reading(self, matches: Iterable[Match]) -> list[Match]:
        """Keep those matches whose read beats computing them, as far as host memory has room for them."""
        if not self.is_open:
            return []
        chosen, room = [], self._host_bytes // self._layout.bytes_per_token
        for match in matches:
            if match.length <= room and self._pays(match):
                chosen.append(match)
                room -= match.length
        return chosen

    def _pays(self, match: Match) -> bool:
        read_s = self._expected_s(match.donor_id, match.length)
        compute_s = self.prefill.seconds(
            self.costs.saving(match.target_start, match.target_end, is_exact=match.is_exact)
        )
        return read_s < (float("inf") if compute_s is None else compute_s)

    def _expected_s(self, donor_id: DonorId, length: int) -> float:
        place = self.cold.place_of(donor_id)
        return float("inf") if place is None else self._used[place].expected_s(length)

    # Reading

    def begin(self, spans: Sequence[Span]) -> SpanReads:
        """Begin to read spans of stored donors.

        Raises:
            Exception: It failed here or on another rank; `close` is to follow.
        """
        return self._on_all(partial(self._begun, spans))

    def _begun(self, spans: Sequence[Span]) -> SpanReads:
        cost = sum(self.costs.saving(span.start, span.end, is_exact=span.fidelity is Fidelity.EXACT) for span in spans)
        expected_s = sum(0.0 if span.donor is None else self._patience_for(span) for span in spans)
        patience_s = max(_LEAST_PATIENCE_S, expected_s)
        compute_s = self.prefill.seconds(cost)
        if compute_s is not None:
            patience_s = min(max(patience_s, min(compute_s / _SHARE_OF_COMPUTING, _MOST_PATIENCE_S)), compute_s)
        return SpanReads([self._begin(span) for span in spans], patience_s, self._clock)

    def _patience_for(self, span: Span) -> float:
        assert span.donor is not None
        expected_s = self._expected_s(span.donor.donor_id, span.length)
        return 0.0 if expected_s == float("inf") else _TIMES_EXPECTED * expected_s

    def _begin(self, span: Span) -> SpanRead:
        donor = span.donor
        place = None if donor is None or not self.is_open else self.cold.place_of(donor.donor_id)
        if donor is None or place is None:
            return SpanRead(None, 0, span.donor_start, span.length, None)
        assert isinstance(donor.kv, StoredKV)
        named = (place, donor.kv.key, span.donor_start, span.length)
        shared = self._fetches.get(named)  # requests that wait for the same text share a read
        if shared is None or shared.fetch.is_cancelled:
            shared = self._fetches[named] = SharedFetch(self._used[place].reader.fetch(*named[1:]))
        return SpanRead(donor, place, span.donor_start, span.length, shared.join())

    def settle(self, reads: SpanReads) -> bool:
        """Take what has arrived on all ranks to host memory; False while any is awaited. `reads.miss` says what lacks.

        Raises:
            Exception: It failed here or on another rank; `close` is to follow.
        """
        # Late is what the first rank's clock says, and then whatever any rank still waits for.
        in_time = int(self._ranks.rank != 0 or not reads.is_late)
        *lowest, in_time = self._ranks.lowest([*reads.states(), in_time])
        agreed = [ReadState(state) for state in lowest]
        is_late = ReadState.PENDING in agreed
        if is_late and in_time:
            return False
        self._on_all(partial(self._take_all, reads, agreed))
        if any(state is not ReadState.THERE for state in agreed):
            reads.miss = _LATE if is_late else _LOST
        reads.cancel()
        return True

    def _take_all(self, reads: SpanReads, states: Sequence[ReadState]) -> None:
        for read, state in zip(reads.reads, states, strict=True):
            self._take(read, state)

    def _take(self, read: SpanRead, state: ReadState) -> None:
        if state is ReadState.THERE:
            assert read.donor is not None
            assert isinstance(read.donor.kv, StoredKV)
            self._library.keep(read.donor, read.start, read.block())
            self.cold.record_hit(read.donor.kv.key, read.length)
            self._used[read.place].was_in_time()
            self._used[read.place].touch(read.donor.kv.key)
        elif state is ReadState.LOST:
            if read.donor is not None:
                assert isinstance(read.donor.kv, StoredKV)
                self.cold.remove(read.donor.kv.key, read.place)
        elif state is ReadState.PENDING:
            self._used[read.place].was_late()  # on all ranks: the first one chooses what is read

    def nap(self, reads: SpanReads) -> None:
        """Wait a moment, where a scheduler has nothing else to do than to look again and again."""
        reads.wait(_NAP_S)
