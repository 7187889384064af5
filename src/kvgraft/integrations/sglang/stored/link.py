"""The stores of one scheduler: it offers donors, follows the contents of stores and reads from them.

A space is opened for the weights that are in memory, and closed before they may change. Nothing that other weights computed
is found in it, whatever the model is called.

Ranks do what is here together: where it fails on one of them, it fails on all.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from kvgraft.integrations.sglang.stored.shared_read import SharedRead
from kvgraft.integrations.sglang.stored.write_behind import MAX_QUEUED_BYTES, WriteBehind
from kvgraft.memory.store.record import DonorRecord, StoreNews, space_name
from kvgraft.memory.store.tier import UsedStore
from kvgraft.reuse.reads import PrefillSpeed, ReadState, ReadTerms, StoredReads, StoredSpan, store_miss
from kvgraft.types import DonorId, Fidelity, Match, StoreCounts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvgraft.donors import CostModel, Donor
    from kvgraft.integrations.sglang.donors.keeper import DonorKeeper
    from kvgraft.integrations.sglang.planning.ranks import Ranks
    from kvgraft.integrations.sglang.planning.spans import LoadSpan
    from kvgraft.memory.store import KVStore, RowLayout

_BUSY_PIECES, _IDLE_PIECES = 16, 8
"""Pieces of K/V that are copied for writing per new request, at most, and per round of an idle scheduler."""
_NEWS_BUSY, _NEWS_IDLE = 16, 64
"""Donors of others that are listed likewise, and in one go of an idle scheduler."""
_IDLE_S = 0.25
"""Time in which an idle scheduler lists what is new; there is much of it only after a start."""
_NAP_S = 0.002
"""How long a scheduler that has nothing else to do waits for a read before it looks around again."""
_UNKNOWN = Match(0, DonorId(-1), 0, 1)
"""Stands for a span whose donor this rank does not know."""


class StoreLink:
    """Not thread-safe. Ranks that serve requests together make the same calls in the same order."""

    def __init__(
        self,
        stores: Sequence[KVStore],
        keeper: DonorKeeper,
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
            keeper: Donors, resident and stored.
            ranks: Decide together.
            layout: Of this rank's K/V.
            costs: Of computing.
            weights: Digest of this rank's weights as they are now.
            host_bytes: Most K/V that are read for one request.
            clock: Seconds.
        """
        self.costs = costs
        self.prefill = PrefillSpeed()
        self._stores, self._keeper, self._layout, self._ranks = stores, keeper, layout, ranks
        self._weights, self._host_bytes, self._clock = weights, host_bytes, clock
        self._digest: str | None = None
        self._stored = keeper.stored
        self._room = host_bytes // layout.bytes_per_token
        self._terms = ReadTerms(self._stored, self._expected_s, lambda: self.prefill.per_s, most_tokens=self._room)
        self._behind = WriteBehind(keeper, ranks, layout.bytes_per_token)
        self._used: list[UsedStore] = []
        self._fetches: WeakValueDictionary[tuple[int, str, int, int], SharedRead] = WeakValueDictionary()
        self._space = ""
        self.is_open = False

    # The space

    def open(self) -> None:
        """Begin to write, to look and to read in the space of the weights as they are now.

        Raises:
            FailedTogetherError: It failed here or on another rank; `close` is to follow.
        """
        self._ranks.together(self._open)

    def _open(self) -> None:
        assert not self.is_open
        if self._digest is None:
            self._digest = self._weights()
        # Of all ranks: one that was given other weights must not be put together with those of before.
        weights = " ".join(self._ranks.gathered(self._digest))
        size = self._ranks.size
        spaces = [
            space_name("sglang", weights, self._layout.description, f"rank {rank} of {size}") for rank in range(size)
        ]
        self._enter(spaces)
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
        self._behind.begin([used.writer for used in self._used])

    def close(self, *, weights_change: bool) -> None:
        """Forget everything that was in the space; what is being written is finished, what waits is not written."""
        if weights_change:
            self._digest = None
        self._behind.end()
        for used in self._used:
            used.leave()
        self._fetches.clear()
        self._stored.clear()
        self._keeper.version += 1
        self.is_open = False

    @property
    def num_stored(self) -> int:
        """Donors whose K/V lie in stores alone."""
        return self._keeper.catalogue.num_stored

    def counts(self) -> tuple[StoreCounts, ...]:
        """Return the counts of each store."""
        return tuple(used.counts() for used in self._used)

    # Between requests

    def tick(self, num_tokens: int = 0, *, is_idle: bool = False) -> None:
        """Bring what is new into the stores, and into the list what is new in them, some of it at a time.

        Args:
            num_tokens: Of a new request. As many are copied for writing: a small part of what computing them takes, and a
                scheduler that is never idle keeps up.
            is_idle: Whether there is nothing else to do.

        Raises:
            FailedTogetherError: It failed here or on another rank; `close` is to follow.
        """
        if self.is_open:
            self._ranks.together(partial(self._tick, num_tokens, is_idle=is_idle))

    def _tick(self, num_tokens: int, *, is_idle: bool) -> None:
        pieces = _IDLE_PIECES if is_idle else min(_BUSY_PIECES, self._behind.pieces_of(num_tokens))
        self._write(pieces if self._behind.has_room() else 0)
        stop = time.perf_counter() + (_IDLE_S if is_idle else 0.0)
        while self._list(_NEWS_IDLE if is_idle else _NEWS_BUSY, stop):
            pass

    def _write(self, num_pieces: int) -> None:
        self._behind.work(num_pieces)
        for used in self._used:
            used.writer.take_written()  # the next look finds it, and what other ranks have

    def _list(self, limit: int, stop: float) -> bool:
        """List some news of the stores, those of the first rank; returns whether it has more, and time for it."""

        def news_of_stores() -> tuple[list[str], list[StoreNews], bool]:
            again = self._stored.recall()
            for used in self._used:
                used.forget(again)
            news = [used.news(limit) for used in self._used]
            return again, news, any(len(each.added) == limit for each in news) and time.perf_counter() < stop

        again, everything, has_more = self._ranks.shared(news_of_stores)
        self._take_news(again, everything)
        return has_more

    def _take_news(self, again: Sequence[str], everything: Sequence[StoreNews]) -> None:
        self._stored.recalled(again)  # clocks of ranks differ
        for store, news in enumerate(everything):
            for key in news.removed:
                self._stored.lost(key, store)
            for record in news.added:
                self._stored.join(record, store)
            self._keeper.version += bool(news.removed or news.added)

    # Reading

    def read_cost(self, match: Match) -> float:
        """Return the cost of reading a match; see `ReadTerms`."""
        return self._terms.cost(match)

    def _expected_s(self, store: int, num_tokens: int) -> float:
        return self._used[store].expected_s(num_tokens)

    def begin(self, spans: Sequence[LoadSpan]) -> StoredReads:
        """Begin to read spans of stored donors, as many as host memory has room for.

        Raises:
            FailedTogetherError: It failed here or on another rank; `close` is to follow.
        """
        begun: list[StoredReads] = []
        try:
            self._ranks.together(lambda: begun.append(self._begun(self._fitting(spans))))
        except BaseException:
            for reads in begun:
                reads.cancel()
            raise
        return begun[0]

    def _fitting(self, spans: Iterable[LoadSpan]) -> list[LoadSpan]:
        chosen, room = [], self._room
        for span in spans:
            if span.length <= room:
                chosen.append(span)
                room -= span.length
        return chosen

    def _begun(self, spans: Sequence[LoadSpan]) -> StoredReads:
        cost = sum(
            self.costs.saving(span.start, span.end, is_shifted=span.fidelity is Fidelity.SHIFTED) for span in spans
        )
        reads = [self._begin(span) for span in spans]
        return StoredReads(reads, self._terms.patience_s([read.match for read in reads], cost), self._clock)

    def _begin(self, span: LoadSpan) -> StoredSpan:
        donor = span.donor
        if donor is None:
            return StoredSpan(_UNKNOWN, None, 0, None)
        key, store = self._stored.key_of(donor.donor_id), self._stored.holder_of(donor.donor_id)
        if key is None or store is None:
            return StoredSpan(span.match, None, 0, None)
        named = (store, key, span.donor_start, span.length)
        shared = self._fetches.get(named)  # requests that wait for the same text share a read
        if shared is None or shared.is_cancelled:
            shared = self._fetches[named] = SharedRead(self._used[store].reader.fetch(*named[1:]))
        return StoredSpan(span.match, donor, store, shared.join())

    def settle(self, reads: StoredReads) -> bool:
        """Take what has arrived on all ranks to host memory; False while any is awaited. `reads.miss` says what lacks.

        Raises:
            FailedTogetherError: It failed here or on another rank; `close` is to follow.
        """
        return self._ranks.together(partial(self._settle, reads))

    def _settle(self, reads: StoredReads) -> bool:
        # The first rank's clock decides that it is late, and then every read that a rank still waits for.
        in_time = int(self._ranks.rank != 0 or not reads.is_late)
        *lowest, in_time = self._ranks.lowest([*(int(span.state) for span in reads.spans), in_time])
        states = [ReadState(state) for state in lowest]
        if ReadState.PENDING in states and in_time:
            return False
        self._take_all(reads, states)
        if any(state is not ReadState.THERE for state in states):
            reads.miss = store_miss(states)
        reads.cancel()
        return True

    def _take_all(self, reads: StoredReads, states: Sequence[ReadState]) -> None:
        for span, state in zip(reads.spans, states, strict=True):
            if state is ReadState.PENDING:
                self._used[span.store].was_late()  # on all ranks: the first one chooses what is read
            elif span.donor is not None:
                self._take(span, span.donor, state)

    def _take(self, span: StoredSpan, donor: Donor, state: ReadState) -> None:
        key = DonorRecord.of(donor).key
        if state is ReadState.THERE:
            assert isinstance(span.read, SharedRead)
            self._keeper.keep(donor, span.match.donor_start, span.read.block())
            self._used[span.store].was_in_time()
            self._used[span.store].touch(key)
        elif state is ReadState.LOST:
            self._stored.lost(key, span.store)
            self._keeper.version += 1

    def nap(self, reads: StoredReads) -> None:
        """Wait a moment, where a scheduler has nothing else to do than to look again and again."""
        reads.wait(_NAP_S)
