"""Stores behind the engine's memory: what they are given, what they have, and what is read from them for requests.

Nothing here waits for a store. Donors go to the stores when their request has ended, so that demotion is forgetting and a
killed process has lost little. What stores have stands in the catalogue like any donor, with a `StoredKV`; a plan takes spans
of it where reading them beats computing them. Several stores are written alike, and the first one that has a donor is read.
"""

from __future__ import annotations

import logging
import math
import time
from functools import partial
from typing import TYPE_CHECKING

from kvgraft.donors.record import DonorRecord, StoreNews
from kvgraft.engine.cold_spans import ColdReads, ColdSpan
from kvgraft.engine.promotion import Promotions
from kvgraft.engine.store_writes import StoreWrites
from kvgraft.engine.stored_cover import StoredPart
from kvgraft.errors import StoreMissError
from kvgraft.memory.store.tier import UsedStore
from kvgraft.reuse.stored import StoredDonors, StoredKV

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvgraft.donors import Donor
    from kvgraft.engine.donor_memory import DonorMemory
    from kvgraft.engine.request import Request
    from kvgraft.memory import KVBlock
    from kvgraft.memory.store import KVStore
    from kvgraft.memory.store.layout import RowLayout
    from kvgraft.types import Match, StoreCounts

logger = logging.getLogger(__name__)

_QUEUED_BYTES = 1 << 30
"""K/V on their way into or out of a store at most, unless a single donor has more."""
_PATIENCE, _LEAST_PATIENCE_S, _MOST_PATIENCE_S = 4.0, 0.1, 30.0
"""Times what a read is expected to take that a request waits for it; the least, for a machine that stalls; the most."""
_LOOK_S = 1.0
_NEWS_S, _FEW = 5e-3, 8
"""How long a step may be held up by donors that stores tell of, and how many are taken in at once."""
_TOUCH_S, _MOST_TOUCHED = 10.0, 4096
"""How often a store is told that an object was of use, and of how many objects it is remembered when that was."""
_CLOSE_S = 5.0
"""How long the end of an engine may take to write what waits."""


class StoreTier:
    """Keeps stores, catalogue and memory together; a `DonorWatcher`. Not thread-safe, but for the threads within.

    Attributes:
        stores: In the order in which they are read.
        writes: What the stores are given.
        is_behind: Whether the last step left news for the next.
        flops_per_s: Says how fast this engine computes prompts; None while that is not known: a read is taken for faster
            then, so that the first request behind a start finds what is stored.
    """

    def __init__(
        self,
        stores: Sequence[KVStore],
        space: DonorMemory,
        layout: RowLayout,
        name: str,
        *,
        min_run: int,
        max_generation: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to look into stores.

        Args:
            stores: In order; closed with this.
            space: The engine's K/V.
            layout: Of a token's row.
            name: Of the space in the stores: whose K/V they are.
            min_run: Shortest donor.
            max_generation: Highest generation of a donor.
            clock: Seconds.
        """
        self.stores = [
            UsedStore(
                store,
                name,
                layout,
                looks_into=(name,),
                max_queued_bytes=_QUEUED_BYTES,
                max_pending_bytes=_QUEUED_BYTES,
                clock=clock,
            )
            for store in stores
        ]
        self.flops_per_s: Callable[[], float | None] = lambda: None
        self._space = space
        self._layout = layout
        self._name = name
        self._clock = clock
        self._catalogue = space.donors
        self._stored = StoredDonors(space.donors, min_run=min_run, max_generation=max_generation)
        self._where: dict[str, set[int]] = {}
        self.writes = StoreWrites(space, self.stores, self._stored, self._where, min_run=min_run)
        self._promotions = Promotions(space)
        self.is_behind = False
        self._is_away = False
        self._touched: dict[str, float] = {}
        space.donors.watch(self)

    @property
    def name(self) -> str:
        """Of the space in the stores."""
        return self._name

    @property
    def num_cold(self) -> int:
        """Donors whose K/V lie in stores alone."""
        return self._catalogue.num_far

    def status(self) -> tuple[StoreCounts, ...]:
        """What each store has done so far."""
        return tuple(used.counts() for used in self.stores)

    def step(self, budget_s: float = _NEWS_S) -> None:
        """Take in what the threads have found and done since the last call; never waits.

        Args:
            budget_s: What the donors that stores tell of may take, a few of them at least; the others wait for the next call.
        """
        self.is_behind = False
        if self._is_away:
            return  # what its threads still tell is of the space that was left
        deadline = self._clock() + budget_s
        for number, used in enumerate(self.stores):
            for written in used.writer.take_written():
                if written.is_stored:
                    self._where.setdefault(written.key, set()).add(number)
                self.writes.take_written(number, written.key, is_stored=written.is_stored)
            while (news := used.news(_FEW)).added or news.removed:
                self._take_news(number, news)
                if self._clock() >= deadline:
                    self.is_behind = True
                    break
        if again := self._stored.with_room():
            for used in self.stores:
                used.forget(again)
        self.writes.step()
        for donor in self._promotions.step():
            assert isinstance(donor.kv, StoredKV)
            self.writes.cover.add(donor.donor_id, [StoredPart(0, donor.num_tokens, donor.kv.key, is_whole=True)])

    # Plans and reads.

    def read_cost(self, match: Match) -> float:
        """What reading the K/V of a match costs, in operations that could be done meanwhile; see `plan_graft`."""
        donor = self._catalogue.get(match.donor_id)
        if donor is None or not isinstance(donor.kv, StoredKV):
            return 0.0
        number = self._store_of(donor.kv.key)
        if number is None:
            return math.inf
        seconds, speed = self.stores[number].expected_s(match.length), self.flops_per_s()
        if math.isinf(seconds):
            return seconds
        return 0.0 if speed is None else seconds * speed

    def begin_reads(
        self, request: Request, spans: Sequence[Match], donors: Sequence[Donor], flops: float
    ) -> ColdReads | None:
        """Begin to read those of a plan's spans that lie in stores.

        Args:
            request: Whose plan it is, as it was before it was planned.
            spans: Of the plan.
            donors: Of the spans.
            flops: What computing these spans would take: nobody waits longer than that.

        Returns:
            None if there are none.
        """
        cold: list[ColdSpan] = []
        expected_s = 0.0
        for match, donor in zip(spans, donors, strict=True):
            if not isinstance(donor.kv, StoredKV):
                continue
            number = self._store_of(donor.kv.key) or 0
            used = self.stores[number]
            if math.isfinite(
                seconds := used.expected_s(match.length)
            ):  # otherwise it rests by now, and refuses at once
                expected_s = max(expected_s, seconds)
            cold.append(
                ColdSpan(match, donor, number, used.reader.fetch(donor.kv.key, match.donor_start, match.length))
            )
        if not cold:
            return None
        speed = self.flops_per_s()
        compute_s = math.inf if speed is None else flops / speed
        patience_s = min(max(_PATIENCE * expected_s, _LEAST_PATIENCE_S), compute_s, _MOST_PATIENCE_S)
        return ColdReads(request, cold, patience_s, self._clock)

    def taken(self, span: ColdSpan) -> KVBlock:
        """The K/V of a span that has arrived.

        Raises:
            StoreError: It has not: the store is asked no more for what it has lost.
        """
        assert isinstance(span.donor.kv, StoredKV)
        try:
            block = span.fetch.block()
        except StoreMissError:
            self._gone(span.store, span.donor.kv.key)
            raise
        self.stores[span.store].was_in_time()
        return block

    def gave_up(self, span: ColdSpan) -> None:
        """Note that a span did not come in time."""
        span.fetch.cancel()
        self.stores[span.store].was_late()

    def used(self, reads: ColdReads) -> None:
        """Note that a request has what it wanted: what it read is promoted, whole, if the host has room for it."""
        for span in reads.spans:
            if span.is_copied and isinstance(span.donor.kv, StoredKV):
                self._touch(span.donor.kv.key)
            donor = self._catalogue.get(span.donor.donor_id)
            if donor is None or not isinstance(donor.kv, StoredKV) or not span.is_copied:
                continue
            used = self.stores[span.store]
            whole = span.fetch if span.fetch.length == donor.num_tokens else None
            self._promotions.begin(donor, whole, partial(used.reader.fetch, donor.kv.key, 0, donor.num_tokens))

    def used_at_hand(self, match: Match) -> None:
        """Note that a donor in memory was of use: stores should not lose first what is used most."""
        for part in self.writes.cover.of(match.donor_id):
            if part.start < match.donor_start + match.length and match.donor_start < part.stop:
                self._touch(part.key)

    def _touch(self, key: str) -> None:
        now = self._clock()
        if now < self._touched.get(key, -math.inf) + _TOUCH_S:
            return
        if len(self._touched) >= _MOST_TOUCHED:
            self._touched.clear()
        self._touched[key] = now
        for number in self._where.get(key, ()):
            self.stores[number].touch(key)

    def label(self, donor: Donor) -> str:
        """Which store has the K/V of a donor that lies in one alone."""
        number = self._store_of(donor.kv.key) if isinstance(donor.kv, StoredKV) else None
        return "store" if number is None else self.stores[number].store.name

    # What becomes of donors in memory.

    def demote(self, donor: Donor) -> bool:
        """Have a donor's K/V in a store alone from now on, if one has them; the caller frees them."""
        key = self._stored.key_of(donor.donor_id)
        if key is None or self._store_of(key) is None:
            return False
        self.writes.stop_reading(donor.donor_id)
        self._catalogue.rebind(donor.donor_id, StoredKV(key), is_far=True)
        return True

    # What stores have.

    def _store_of(self, key: str) -> int | None:
        return min(self._where.get(key, ()), default=None)

    def _take_news(self, number: int, news: StoreNews) -> None:
        for key in news.removed:
            self._gone(number, key)
        fresh: list[DonorRecord] = []
        for record in news.added:
            self._where.setdefault(record.key, set()).add(number)
            if not self.writes.cover.contains(record.key):
                fresh.append(record)
            for donor_id, part in list(self.writes.cover.whole(record.key)):
                self.writes.bind(donor_id, part)
        self._stored.take(StoreNews(tuple(fresh)))

    def _gone(self, number: int, key: str) -> None:
        """Note that a store has an object no more."""
        left = self._where.get(key, set())
        left.discard(number)
        if not left:
            self._where.pop(key, None)
            self.writes.lost(key)
            self._stored.lost(key)

    # Hears of the catalogue.

    def donor_added(self, donor: Donor) -> None:
        """Nothing is known of its parts yet."""

    def donor_removed(self, donor: Donor) -> None:
        """Forget what was known of it; what stores have of it is told of again and comes back as donors of its own."""
        keys = {*self.writes.forget(donor.donor_id), self._stored.forget(donor.donor_id)}
        again = [key for key in keys if key is not None and not self.writes.cover.contains(key)]
        for used in self.stores:
            used.forget(again)

    def donors_reset(self) -> None:
        """Forget what was known of all of them."""
        self.writes.forget_all()
        self._stored.clear()

    # Beginning and end.

    def leave(self) -> None:
        """Forget what stores have; nothing is read, written or looked for until `enter`. The catalogue was reset."""
        for used in self.stores:
            used.leave()
        self._promotions.clear()
        self.writes.clear()
        self._where.clear()
        self._is_away = True

    def enter(self, name: str) -> None:
        """Look into the space `name`, behind `leave`."""
        self._name = name
        self._is_away = False
        for used in self.stores:
            used.enter(name, self._layout, (name,))

    def flush(self, timeout_s: float) -> bool:
        """Wait until stores have what they were offered and this knows what they have; False if that takes longer."""
        if self._is_away:
            return False
        deadline = self._clock() + timeout_s
        while self.writes.is_busy and self._clock() < deadline:
            self.step()
            for used in self.stores:
                used.writer.flush(0.01)
        is_complete = all(self._look(used, deadline) for used in self.stores)
        self.step(max(0.0, deadline - self._clock()))
        return is_complete and not self.writes.is_busy

    def _look(self, used: UsedStore, deadline: float) -> bool:
        """Have a store looked into; its feed holds no more than so many donors at once, so they are taken in meanwhile."""
        assert used.feed is not None
        while not used.feed.look(min(_LOOK_S, max(0.0, deadline - self._clock()))):
            self.step(_LOOK_S)
            if self._clock() >= deadline:
                return False
        return True

    def close(self) -> None:
        """Write what waits, for a few seconds at most, and close the stores."""
        self._promotions.close()
        deadline = self._clock() + _CLOSE_S
        while self.writes.is_copying and self._clock() < deadline:
            self.writes.step()
        for used in self.stores:
            used.stop(max(0.0, deadline - self._clock()))
        for used in self.stores:
            try:
                used.store.close()
            except Exception:
                logger.exception("%s cannot be closed", used.store.name)
