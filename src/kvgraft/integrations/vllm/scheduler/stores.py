"""The scheduler's half of stores: it looks into them and weighs reads, which workers do. Holds no K/V."""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING

from kvgraft.integrations.vllm.messages import ReadCost, Write
from kvgraft.memory.store.record import DonorRecord
from kvgraft.memory.store.tier import StoreFeed, Touches
from kvgraft.reuse.reads import PrefillSpeed, ReadTerms
from kvgraft.reuse.stored import is_stored
from kvgraft.reuse.stored_donors import StoredDonors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvgraft.donors import Donor, DonorCatalogue
    from kvgraft.integrations.vllm.messages import StoreReport
    from kvgraft.memory.store import KVStore
    from kvgraft.memory.store.record import StoreNews
    from kvgraft.types import DonorId

logger = logging.getLogger(__name__)

_HOPEFUL = ReadCost(1e-3, 0.0)
"""Until workers have measured: something must be read for that."""


class PrefillSteps(PrefillSpeed):
    """Speed of prefill in tokens per second, from the engine's steps. With steps sent in advance the latest one is timed."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()
        self._clock = clock
        self._running: tuple[int, float] | None = None

    def step_begins(self, num_tokens: int, *, is_prefill_alone: bool) -> None:
        """Note that a step of `num_tokens` is sent out; one that also grafts is not measured."""
        self._running = (num_tokens, self._clock()) if is_prefill_alone else None

    def step_ends(self) -> None:
        """Note that its result is there."""
        if self._running is not None:
            num_tokens, started = self._running
            self._running = None
            self.observe(num_tokens, num_tokens, self._clock() - started)


class Stores:
    """Follows the stores of an engine. Not thread-safe; of an engine without any there are `NoStores`.

    A donor counts as stored when every rank's space has it in one and the same store.
    """

    def __init__(
        self, stores: Sequence[KVStore], catalogue: DonorCatalogue, *, num_ranks: int, min_run: int, max_generation: int
    ) -> None:
        self.donors = StoredDonors(catalogue, min_run=min_run, max_generation=max_generation)
        self.speed = PrefillSteps()
        self.terms = ReadTerms(self.donors, self._expected_s, lambda: self.speed.per_s)
        self.cost = _HOPEFUL
        self._stores = tuple(stores)
        self._touches = tuple(Touches(store) for store in self._stores)
        self._catalogue = catalogue
        self._num_ranks = num_ranks
        self._spaces: dict[int, str] = {}
        self._feeds: list[StoreFeed] = []

    def __bool__(self) -> bool:
        return bool(self._stores)

    @property
    def are_files(self) -> bool:
        """Whether all of them are directories."""
        return {store.name for store in self._stores} <= {"file"}

    @property
    def spaces(self) -> tuple[str, ...]:
        """Spaces of all ranks; empty until every rank has proved which weights it has."""
        return tuple(self._spaces[rank] for rank in sorted(self._spaces)) if self._is_proved else ()

    @property
    def _is_proved(self) -> bool:
        return len(self._spaces) == self._num_ranks

    def receive(self, report: StoreReport) -> None:
        """Take a report of the workers."""
        if report.cost is not None:
            self.cost = report.cost
        if report.spaces:
            self._spaces |= report.spaces
            self._open()
        for key in report.unreadable:
            for number in self.donors.holders(key):
                self._feeds[number].forget([key])  # should it be there after all
            self.donors.lost(key)

    def news(self, reserved_tokens: int) -> None:
        """Follow the stores, but for so many tokens of the catalogue; costs nothing if nothing has changed."""
        for number, feed in enumerate(self._feeds):
            self._take(number, feed.news())
        if again := self.donors.recall(reserved_tokens):
            for feed in self._feeds:
                feed.forget(again)

    def touch(self, donor_ids: Iterable[DonorId]) -> None:
        """Have the stores that hold these donors note their use, wherever they were read from; never waits."""
        keys = {key for donor_id in donor_ids if (key := self.donors.key_of(donor_id)) is not None}
        for number, touches in enumerate(self._touches[: len(self._feeds)]):
            touches.report(self.spaces, [key for key in keys if number in self.donors.holders(key)])

    def write_of(self, donor: Donor) -> Write | None:
        """Return the command that stores a new donor; None if stores hold it."""
        record = DonorRecord.of(donor)
        return Write(donor.donor_id, record) if self.donors.offer(donor.donor_id, record.key) else None

    def tier_of(self, donor_id: DonorId) -> str:
        """Return where a donor's K/V lie: `host`, or the name of the first store that holds them."""
        if not is_stored(self._catalogue.get(donor_id)):
            return "host"
        number = self.donors.holder_of(donor_id)
        return "store" if number is None else self._stores[number].name

    def reset(self) -> None:
        """Forget what the weights of before have stored; it comes back if workers prove the same weights again."""
        self._close_feeds()
        self._spaces.clear()

    def look(self, timeout_s: float) -> bool:
        """Wait until the stores were looked into; False if it takes longer. For tests.

        Raises:
            StoreError: One cannot be looked into.
        """
        return all(feed.look(timeout_s) for feed in self._feeds)

    def close(self) -> None:
        """Give connections back."""
        self._close_feeds()
        for touches in self._touches:
            touches.close()
        for store in self._stores:
            store.close()

    def _expected_s(self, _: int, num_tokens: int) -> float:
        """Expected seconds of a read: workers report one cost of all stores."""
        return self.cost.per_span_s + num_tokens * self.cost.per_token_s if self._feeds else math.inf

    def _open(self) -> None:
        self._close_feeds()
        if self._is_proved:
            self._feeds = [StoreFeed(store, self.spaces) for store in self._stores]
            logger.info("donors are shared through %s", ", ".join(store.name for store in self._stores))

    def _close_feeds(self) -> None:
        for feed in self._feeds:
            feed.close()
        self._feeds = []
        self.donors.clear()

    def _take(self, number: int, news: StoreNews) -> None:
        for key in news.removed:
            self.donors.lost(key, number)
        for record in news.added:
            self.donors.join(record, number)
