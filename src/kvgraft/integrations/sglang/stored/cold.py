"""Donors of which only a store has the K/V, beside those whose K/V are at hand."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from kvgraft.donors import DonorCatalogue
from kvgraft.errors import CapacityError, CorruptCacheError
from kvgraft.integrations.sglang.donors.ranges import subtract
from kvgraft.integrations.sglang.planning.regions import cut
from kvgraft.reuse.stored import StoredKV
from kvgraft.types import DonorId, KeyedNamespace

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvgraft.config.sglang import SGLangConfig
    from kvgraft.donors import Donor
    from kvgraft.donors.record import DonorRecord
    from kvgraft.integrations.sglang.donors.library import DonorLibrary
    from kvgraft.types import Match, Namespace

_COLD = 1 << 62
"""Set in the ids of donors in stores, which are counted in a catalogue of their own."""


class ColdDonors:
    """What stores have, whether it is at hand as well or not. Not thread-safe.

    They are listed apart from donors at hand, so that a copy in memory is never hidden by one in a store, and so that nothing
    has to be noted when K/V leave memory.
    """

    def __init__(self, config: SGLangConfig, secret: bytes) -> None:
        self._catalogue = DonorCatalogue(config.donor_tokens, min_run=config.min_run, secret=secret)
        self._ids: dict[str, DonorId] = {}
        self._places: dict[str, set[int]] = {}
        self._min_run = config.min_run
        self._max_generation = config.max_generation
        self.version = 0

    def __len__(self) -> int:
        return len(self._catalogue)

    @property
    def num_tokens(self) -> int:
        """Tokens of all of them."""
        return self._catalogue.num_tokens

    def place_of(self, donor_id: DonorId) -> int | None:
        """Return the number of the first store that has a donor; None if none is known to have it any more."""
        donor = self.get(donor_id)
        if donor is None:
            return None
        assert isinstance(donor.kv, StoredKV)
        return min(self._places[donor.kv.key])

    def add(self, record: DonorRecord, place: int) -> None:
        """Note that store number `place` has a donor. Where there is no room what is worth least leaves the list."""
        if record.key in self._places:
            self._places[record.key].add(place)
            return
        if record.num_tokens < self._min_run or record.generation > self._max_generation:
            return
        try:
            added = self._catalogue.add(
                KeyedNamespace(record.namespace_key),
                record.token_ids,
                StoredKV(record.key),
                generation=record.generation,
                start_position=record.start_position,
                front=record.front,
            )
        except CapacityError:
            return  # longer than the list
        for donor in added.evicted:
            self._forget(donor)
        if added.donor is not None:
            self._ids[record.key], self._places[record.key] = added.donor.donor_id, {place}
        self.version += 1

    def remove(self, key: str, place: int) -> None:
        """Note that store number `place` has a donor no more."""
        places = self._places.get(key)
        if places is None:
            return
        places.discard(place)
        if not places:
            self._forget(self._catalogue.remove(self._ids[key]))
            self.version += 1

    def find(
        self,
        namespace: Namespace | KeyedNamespace,
        token_ids: NDArray[np.integer[Any]],
        *,
        start: int,
        max_generation: int | None,
    ) -> list[Match]:
        """Find runs; see `DonorCatalogue.find`."""
        found = self._catalogue.find(namespace, token_ids, start=start, max_generation=max_generation)
        return [replace(match, donor_id=DonorId(match.donor_id | _COLD)) for match in found]

    def get(self, donor_id: DonorId) -> Donor | None:
        """Return a donor under the id that `find` gave it, or None."""
        donor = self._catalogue.get(DonorId(donor_id & ~_COLD))
        return None if donor is None else replace(donor, donor_id=donor_id)

    def has_text(self, donor: Donor) -> bool:
        """Tell whether stores have the text of a donor, as good as it has it, all but less than the shortest run."""
        found = self._catalogue.find(donor.namespace, donor.token_ids, max_generation=donor.generation)
        return donor.num_tokens - sum(match.length for match in found) < self._min_run

    def record_hit(self, key: str, num_tokens: int) -> None:
        """Count tokens that a donor has saved."""
        if key in self._ids:
            self._catalogue.record_hit(self._ids[key], num_tokens)

    def clear(self) -> None:
        """Forget all of them."""
        self._catalogue.reset()
        self._ids.clear()
        self._places.clear()
        self.version += 1

    def check(self) -> None:
        """Verify the list.

        Raises:
            CorruptCacheError: Something does not hold.
        """
        self._catalogue.check()
        listed = {donor.kv: donor.donor_id for donor in self._catalogue}
        if listed != {StoredKV(key): donor_id for key, donor_id in self._ids.items()}:
            raise CorruptCacheError("stored donors and their keys are not the same")
        if self._ids.keys() != self._places.keys() or not all(self._places.values()):
            raise CorruptCacheError("a stored donor is in no store")

    def _forget(self, donor: Donor) -> None:
        assert isinstance(donor.kv, StoredKV)
        del self._ids[donor.kv.key], self._places[donor.kv.key]


class Chooser(Protocol):
    """Says what is worth being read."""

    def worth_reading(self, matches: Iterable[Match]) -> list[Match]:
        """Keep those matches with stored donors whose read beats computing them."""


class AllDonors:
    """A `DonorFinder` over donors at hand and, where these leave something out, donors in stores."""

    def __init__(self, library: DonorLibrary, cold: ColdDonors, chooser: Chooser, min_run: int) -> None:
        self._library, self._cold, self._chooser, self._min_run = library, cold, chooser, min_run

    def __len__(self) -> int:
        return len(self._library) + len(self._cold)

    def find(
        self,
        namespace: Namespace | KeyedNamespace,
        token_ids: NDArray[np.integer[Any]],
        *,
        start: int = 0,
        max_generation: int | None = None,
        proposed: Collection[DonorId] = (),
    ) -> list[Match]:
        """Find runs whose K/V are at hand, and runs between them that are worth being read."""
        live = self._library.find(namespace, token_ids, start=start, max_generation=max_generation, proposed=proposed)
        if len(token_ids) - start - sum(match.length for match in live) <= self._min_run:
            return live
        found = self._cold.find(namespace, token_ids, start=start, max_generation=max_generation)
        cold = self._chooser.worth_reading(between(found, live, self._min_run))
        return sorted([*live, *cold], key=lambda match: match.target_start)


def between(matches: Iterable[Match], taken: Sequence[Match], min_run: int) -> list[Match]:
    """Return the parts of `matches` outside of `taken` that are long enough; both sorted and disjoint."""
    ranges = [(match.target_start, match.target_end) for match in taken]
    parts = [
        cut(match, first, last)
        for match in matches
        for first, last in subtract([(match.target_start, match.target_end)], ranges)
    ]
    return [part for part in parts if part is not None and part.length >= min_run]


def is_cold(donor_id: DonorId) -> bool:
    """Whether an id is that of a donor in a store."""
    return donor_id >= _COLD
