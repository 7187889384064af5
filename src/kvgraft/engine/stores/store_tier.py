"""The stores of the embedded engine: it writes to them, follows their contents and reads from them for requests.

Nothing here waits for a store. Donors go to the stores when their request has ended, so that demotion is forgetting and a
killed process has lost little. Several stores are written alike, and the first one that holds a donor is read. What is stored
and what a read costs is decided in `kvgraft.reuse.stored` and `kvgraft.reuse.reads`.
"""

from __future__ import annotations

import logging
import math
import time
from functools import partial
from typing import TYPE_CHECKING, cast

from kvgraft.engine.stores.promotion import Promotions
from kvgraft.engine.stores.store_writes import StoreWrites
from kvgraft.engine.stores.stored_cover import StoredPart
from kvgraft.errors import StoreError, StoreMissError
from kvgraft.memory.store.tier import UsedStore
from kvgraft.reuse.reads import ReadTerms, StoredReads, StoredSpan
from kvgraft.reuse.stored import StoredKV, is_stored
from kvgraft.reuse.stored_donors import StoredDonors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvgraft.donors import Donor
    from kvgraft.engine.stores.donor_memory import DonorMemory
    from kvgraft.memory import KVBlock
    from kvgraft.memory.store import KVStore
    from kvgraft.memory.store.layout import RowLayout
    from kvgraft.memory.store.record import StoreNews
    from kvgraft.memory.store.tier import Fetch
    from kvgraft.types import Match, StoreCounts

logger = logging.getLogger(__name__)

_QUEUED_BYTES = 1 << 30
"""K/V on their way into or out of a store at most, unless a single donor has more."""
_LOOK_S = 1.0
_NEWS_S, _FEW = 5e-3, 8
"""Time of a step that taking in news of stores may take, and donors that are taken in at once."""
_TOUCH_S, _MOST_TOUCHED = 10.0, 4096
"""Time between two notes that an object was of use, and objects for which it is remembered."""
_CLOSE_S = 5.0
"""How long the end of an engine may take to write what waits."""


class StoreTier:
    """Keeps stores, catalogue and memory together; a `DonorWatcher`. Not thread-safe, but for the threads within.

    Attributes:
        stores: In the order in which they are read.
        stored: Their donors.
        writes: Donors on their way to them.
        is_behind: Whether the last step left news for the next.
        flops_per_s: Returns the speed of this engine's prefill; None while that is not known.
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
        """Begin to look into the space `name` of stores, which are closed with this."""
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
        self.stored = StoredDonors(space.donors, min_run=min_run, max_generation=max_generation, clock=clock)
        self._terms = ReadTerms(self.stored, self._expected_s, self._speed)
        self.writes = StoreWrites(space, self.stores, self.stored, min_run=min_run)
        self._promotions = Promotions(space)
        self.is_behind = False
        self._is_away = False
        self._touched: dict[str, float] = {}
        space.donors.watch(self)

    @property
    def name(self) -> str:
        """Of the space in the stores."""
        return self._name

    def status(self) -> tuple[StoreCounts, ...]:
        """Return the counts of each store."""
        return tuple(used.counts() for used in self.stores)

    def step(self, budget_s: float = _NEWS_S) -> None:
        """Take in what the threads have found and done since the last call; never waits.

        Args:
            budget_s: Time for news of stores; a few donors are taken in at least, the others wait for the next call.
        """
        self.is_behind = False
        if self._is_away:
            return  # what its threads still report is of the space that was left
        deadline = self._clock() + budget_s
        for number, used in enumerate(self.stores):
            for written in used.writer.take_written():
                if written.is_stored:
                    self.stored.hold(written.key, number)
                self.writes.take_written(number, written.key, is_stored=written.is_stored)
            while (news := used.news(_FEW)).added or news.removed:
                self._take_news(number, news)
                if self._clock() >= deadline:
                    self.is_behind = True
                    break
        self._recall()
        self.writes.step()
        for donor in self._promotions.step():
            assert isinstance(donor.kv, StoredKV)
            self.writes.cover.add(donor.donor_id, [StoredPart(0, donor.num_tokens, donor.kv.key, is_whole=True)])

    # Plans and reads.

    def read_cost(self, match: Match) -> float:
        """Return the cost of reading a match, in operations that could be done meanwhile; see `ReadTerms`."""
        return self._terms.cost(match)

    def _expected_s(self, store: int, num_tokens: int) -> float:
        return self.stores[store].expected_s(num_tokens)

    def _speed(self) -> float | None:
        return self.flops_per_s()

    def begin_reads(self, spans: Sequence[Match], donors: Sequence[Donor], flops: float) -> StoredReads | None:
        """Begin to read the stored ones of a plan's spans; None if there are none.

        Args:
            spans: Of the plan.
            donors: Of the spans.
            flops: Cost of computing the spans that are read.
        """
        reads = [self._begin(match, donor) for match, donor in zip(spans, donors, strict=True) if is_stored(donor)]
        if not reads:
            return None
        return StoredReads(reads, self._terms.patience_s((span.match for span in reads), flops), self._clock)

    def _begin(self, match: Match, donor: Donor) -> StoredSpan:
        assert isinstance(donor.kv, StoredKV)
        number = self.stored.holder_of(donor.donor_id) or 0
        fetch = self.stores[number].reader.fetch(donor.kv.key, match.donor_start, match.length)
        return StoredSpan(match, donor, number, fetch)

    def taken(self, span: StoredSpan) -> KVBlock:
        """Return the K/V of a span whose read has ended.

        Raises:
            StoreError: It failed. A store that lost the object is asked for it no more.
        """
        assert span.donor is not None
        assert isinstance(span.donor.kv, StoredKV)
        assert span.read is not None
        try:
            block = cast("Fetch", span.read).block()
        except StoreMissError:
            self._gone(span.store, span.donor.kv.key)
            raise
        self.stores[span.store].was_in_time()
        return block

    def gave_up(self, span: StoredSpan) -> None:
        """Note that a span did not come in time."""
        assert span.read is not None
        span.read.cancel()
        self.stores[span.store].was_late()

    def used(self, reads: StoredReads) -> None:
        """Promote the donors that a request has read from, whole, where the host has room for them."""
        for span in reads.spans:
            if not span.is_copied or span.donor is None:
                continue
            assert isinstance(span.donor.kv, StoredKV)
            self._touch(span.donor.kv.key)
            donor = self._catalogue.get(span.donor.donor_id)
            if donor is None or not isinstance(donor.kv, StoredKV):
                continue
            whole = cast("Fetch", span.read) if span.match.length == donor.num_tokens else None
            reader = self.stores[span.store].reader
            self._promotions.begin(donor, whole, partial(reader.fetch, donor.kv.key, 0, donor.num_tokens))

    def used_resident(self, match: Match) -> None:
        """Note that a resident donor was of use: stores should not lose first what is used most."""
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
        for number in self.stored.holders(key):
            self.stores[number].touch(key)

    def label(self, donor: Donor) -> str:
        """Return the name of the store that has the K/V of a stored donor."""
        number = self.stored.holder_of(donor.donor_id)
        return "store" if number is None else self.stores[number].store.name

    def demote(self, donor: Donor) -> bool:
        """Make a resident donor a stored one, if a store holds it; the caller frees its K/V."""
        if not self.stored.demote(donor.donor_id):
            return False
        self.writes.stop_reading(donor.donor_id)
        return True

    # News of stores.

    def _take_news(self, number: int, news: StoreNews) -> None:
        for key in news.removed:
            self._gone(number, key)
        for record in news.added:
            own = list(self.writes.cover.whole(record.key))
            if not own:
                self.stored.join(record, number)
            self.stored.hold(record.key, number)
            for donor_id, part in own:
                self.writes.bind(donor_id, part)

    def _gone(self, number: int, key: str) -> None:
        """Note that a store has an object no more."""
        if self.stored.lost(key, number):
            self.writes.lost(key)

    def _recall(self, *, is_urgent: bool = False) -> None:
        """Have stores report the donors again that had no room and fit now."""
        if again := self.stored.recall(is_urgent=is_urgent):
            for used in self.stores:
                used.forget(again)

    # `DonorWatcher`.

    def donor_added(self, donor: Donor, before: object) -> None:
        """Do nothing: its parts are noted by `writes`."""

    def donor_removed(self, donor: Donor) -> None:
        """Forget its parts; objects that no other donor has come back as donors of their own."""
        for part in self.writes.forget(donor.donor_id):
            if not self.writes.cover.contains(part.key):
                self.stored.leave_out(part.key, part.stop - part.start)

    def donors_reset(self) -> None:
        """Forget the parts of all donors."""
        self.writes.forget_all()

    # Beginning and end.

    def leave(self) -> None:
        """Forget what stores hold; nothing is read, written or looked for until `enter`."""
        for used in self.stores:
            used.leave()
        self._promotions.clear()
        self.writes.clear()
        self.stored.clear()
        self._is_away = True

    def enter(self, name: str) -> None:
        """Look into the space `name`, after `leave`."""
        self._name = name
        self._is_away = False
        for used in self.stores:
            used.enter(name, self._layout, (name,))

    def rebuild(self) -> None:
        """Begin anew with the same space, after the catalogue was emptied."""
        self.leave()
        self.enter(self._name)

    def flush(self, timeout_s: float) -> bool:
        """Wait until stores have what they were offered and this knows what they have.

        Returns:
            False if it takes longer, or if a store cannot be asked.
        """
        if self._is_away:
            return False
        deadline = self._clock() + timeout_s
        while self.writes.is_busy and self._clock() < deadline:
            self.step()
            for used in self.stores:
                used.writer.flush(0.01)
        self._recall(is_urgent=True)
        is_complete = all(self._look(used, deadline) for used in self.stores)
        self.step(max(0.0, deadline - self._clock()))
        return is_complete and not self.writes.is_busy

    def _look(self, used: UsedStore, deadline: float) -> bool:
        """Have a store looked into; its feed holds no more than so many donors at once, so they are taken in meanwhile."""
        assert used.feed is not None
        try:
            while not used.feed.look(min(_LOOK_S, max(0.0, deadline - self._clock()))):
                self.step(_LOOK_S)
                if self._clock() >= deadline:
                    return False
        except StoreError as error:
            logger.warning("%s", error)
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
