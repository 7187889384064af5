"""What the scheduler's half knows of stores: what they have, what is on its way into them, what reading costs. No K/V."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from kvgraft.donors.record import DonorRecord, StoreNews
from kvgraft.integrations.vllm.messages import ReadCost, Write
from kvgraft.integrations.vllm.scheduler.left_out import LeftOut
from kvgraft.memory.store.tier import StoreFeed, Touches
from kvgraft.reuse.stored import StoredDonors, StoredKV

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvgraft.donors import Donor, DonorCatalogue
    from kvgraft.integrations.vllm.messages import StoreReport
    from kvgraft.memory.store import KVStore
    from kvgraft.types import DonorId

logger = logging.getLogger(__name__)

_HOPEFUL = ReadCost(1e-3, 0.0)
"""Before workers have told: something must be read for them to measure."""
_MOST_OFFERED = 1 << 14
"""Keys that are remembered as on their way; a store that keeps nothing does not fill the memory."""


class Stores:
    """Follows the stores of an engine. Not thread-safe; without stores it does nothing.

    A donor counts as stored when every rank's space has it in one and the same store.
    """

    def __init__(
        self, stores: Sequence[KVStore], catalogue: DonorCatalogue, *, num_ranks: int, min_run: int, max_generation: int
    ) -> None:
        self.donors = StoredDonors(catalogue, min_run=min_run, max_generation=max_generation)
        self.cost = _HOPEFUL
        self.left_out = LeftOut()
        self._stores = tuple(stores)
        self._touches = tuple(Touches(store) for store in self._stores)
        self._catalogue = catalogue
        self._num_ranks = num_ranks
        self._spaces: dict[int, str] = {}
        self._feeds: list[StoreFeed] = []
        self._holders: dict[str, set[StoreFeed]] = {}
        self._offered: dict[str, DonorId] = {}

    def __bool__(self) -> bool:
        return bool(self._stores)

    @property
    def are_files(self) -> bool:
        """Whether all of them are directories."""
        return {store.name for store in self._stores} <= {"file"}

    @property
    def spaces(self) -> tuple[str, ...]:
        """Of all ranks; empty as long as one has not proved which weights it has."""
        return tuple(self._spaces[rank] for rank in sorted(self._spaces)) if self._is_proved else ()

    @property
    def _is_proved(self) -> bool:
        return len(self._spaces) == self._num_ranks

    def receive(self, report: StoreReport) -> None:
        """Take what workers told."""
        if report.cost is not None:
            self.cost = report.cost
        if report.spaces:
            self._spaces |= report.spaces
            self._open()
        for key in report.unreadable:
            for feed in self._holders.pop(key, ()):
                feed.forget([key])  # should it be there after all
            self.donors.lost(key)

    def news(self, room: int) -> None:
        """Follow the stores, with so many tokens free in the catalogue; costs nothing if nothing has changed."""
        for feed in self._feeds:
            self._take(feed, feed.news())
        for key in self.left_out.take(room):
            for feed in self._holders.pop(key, ()):
                feed.forget([key])

    def touch(self, donor_ids: Iterable[DonorId]) -> None:
        """Tell the stores that have these donors that they were of use, wherever they were read from; never waits."""
        keys = {key for donor_id in donor_ids if (key := self.donors.key_of(donor_id)) is not None}
        for feed, touches in zip(self._feeds, self._touches, strict=False):
            touches.tell(self.spaces, [key for key in keys if feed in self._holders.get(key, ())])

    def gone(self, donor: Donor, *, comes_back: bool = True) -> None:
        """Note that a donor has left the catalogue; where a store has it, it comes back once there is room, or not."""
        key = self.donors.forget(donor.donor_id)
        if comes_back and key is not None and key in self._holders:
            self.left_out.add(key, donor.num_tokens)

    def write_of(self, donor: Donor) -> Write | None:
        """The command that stores a new donor; None without stores."""
        if not self._stores:
            return None
        record = DonorRecord.of(donor)
        if record.key in self._holders:
            self._bind(donor.donor_id, record.key)
            return None
        while len(self._offered) >= _MOST_OFFERED:
            del self._offered[next(iter(self._offered))]
        self._offered[record.key] = donor.donor_id
        return Write(donor.donor_id, record)

    def expected_s(self, num_tokens: int, num_spans: int = 1) -> float:
        """Seconds until so many tokens in so many spans are read; infinite where nothing can be."""
        cost = self.cost
        return num_spans * cost.per_span_s + num_tokens * cost.per_token_s if self._feeds else math.inf

    def tier_of(self, donor_id: DonorId) -> str:
        """Where a donor's K/V lie: `host`, or the name of the first store that has them."""
        donor = self._catalogue.get(donor_id)
        if donor is None or not isinstance(donor.kv, StoredKV):
            return "host"
        holders = self._holders.get(donor.kv.key, set())
        names = (store.name for store, feed in zip(self._stores, self._feeds, strict=False) if feed in holders)
        return next(names, "store")

    def reset(self) -> None:
        """Forget what was stored by the weights of before; what is theirs comes back once workers have proved them again."""
        self._close_feeds()
        self._spaces.clear()
        self._offered.clear()

    def look(self, timeout_s: float) -> bool:
        """Wait until the stores were looked into; False if it takes longer. For tests."""
        return all(feed.look(timeout_s) for feed in self._feeds)

    def close(self) -> None:
        """Give connections back."""
        self._close_feeds()
        for touches in self._touches:
            touches.close()
        for store in self._stores:
            store.close()

    def _open(self) -> None:
        self._close_feeds()
        if self._is_proved:
            self._feeds = [StoreFeed(store, self.spaces) for store in self._stores]
            logger.info("donors are shared through %s", ", ".join(store.name for store in self._stores))

    def _close_feeds(self) -> None:
        for feed in self._feeds:
            feed.close()
        self._feeds = []
        self._holders.clear()
        self.left_out.clear()
        self.donors.clear()

    def _take(self, feed: StoreFeed, news: StoreNews) -> None:
        for key in news.removed:
            holders = self._holders.get(key, set())
            holders.discard(feed)
            if not holders and self._holders.pop(key, None) is not None:
                self.left_out.discard(key)
                self.donors.lost(key)
        for record in news.added:
            self._holders.setdefault(record.key, set()).add(feed)
            if not self._bind(self._offered.pop(record.key, None), record.key):
                self._list(record)

    def _list(self, record: DonorRecord) -> None:
        """Take a donor of another process into the catalogue, now or once there is room."""
        num_left_out = self.donors.num_left_out
        self.donors.take(StoreNews((record,)))
        if self.donors.num_left_out > num_left_out:
            self.left_out.add(record.key, record.num_tokens)

    def _bind(self, donor_id: DonorId | None, key: str) -> bool:
        """Note that a donor of this engine is stored; False if it is gone. A cold one of the same text leaves for it."""
        if donor_id is None or self._catalogue.get(donor_id) is None:
            return False
        known = self.donors.donor_of(key)
        if known is not None and known != donor_id:
            old = self._catalogue.get(known)
            if old is None or not is_cold(old) or self._catalogue.is_pinned(known):
                return True
            self._catalogue.remove(known)
            self.donors.forget(known)
        self.donors.bind(donor_id, key)
        return True


def is_cold(donor: Donor) -> bool:
    """Whether a donor's K/V lie in a store alone."""
    return isinstance(donor.kv, StoredKV)
