"""Donors that stores behind the engine have: which of the catalogue's these are, and those of other processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvgraft.types import KeyedNamespace

if TYPE_CHECKING:
    from kvgraft.donors import Donor, DonorCatalogue
    from kvgraft.donors.record import DonorRecord, StoreNews
    from kvgraft.types import DonorId


_MOST_LEFT_OUT = 1 << 14
"""Donors without room that are remembered; a store of millions does not fill the memory."""


@dataclass(frozen=True, slots=True)
class StoredKV:
    """Handle of a donor whose K/V lie in a store alone.

    Attributes:
        key: Name of the object.
    """

    key: str


class StoredDonors:
    """Keeps a catalogue and a store's contents together. Not thread-safe.

    A donor that others have stored joins the catalogue with a `StoredKV` where there is room: it never drives out one whose
    K/V are nearer.
    """

    def __init__(self, catalogue: DonorCatalogue, *, min_run: int, max_generation: int) -> None:
        self.num_left_out = 0
        self._catalogue = catalogue
        self._min_run = min_run
        self._max_generation = max_generation
        self._ids: dict[str, DonorId] = {}
        self._keys: dict[DonorId, str] = {}
        self._left_out: dict[str, int] = {}

    def key_of(self, donor_id: DonorId) -> str | None:
        """Under which key a donor is stored; None if it is not, as far as is known."""
        return self._keys.get(donor_id)

    def donor_of(self, key: str) -> DonorId | None:
        """The donor that is stored under `key`; None if the catalogue has it not."""
        return self._ids.get(key)

    def bind(self, donor_id: DonorId, key: str) -> None:
        """Note that a donor of this process is stored."""
        if self._catalogue.get(donor_id) is not None:
            self._ids[key] = donor_id
            self._keys[donor_id] = key

    def forget(self, donor_id: DonorId) -> str | None:
        """Note that a donor has left the catalogue; returns its key if it was stored."""
        key = self._keys.pop(donor_id, None)
        if key is not None and self._ids.get(key) == donor_id:  # another donor may have been bound to it since
            del self._ids[key]
        return key

    def take(self, news: StoreNews) -> list[Donor]:
        """Follow a store: add what others have stored, forget what is gone.

        Returns:
            Donors that joined the catalogue.

        Complexity: O(tokens of the news).
        """
        for key in news.removed:
            self.lost(key)
        joined = (self._join(record) for record in news.added)
        return [donor for donor in joined if donor is not None]

    def with_room(self) -> list[str]:
        """Keys of donors that were left out and fit by now: have the feed tell of them again. Each is named once.

        Complexity: O(1) while the one that was left out first does not fit.
        """
        room = self._catalogue.capacity_tokens - self._catalogue.num_tokens
        keys: list[str] = []
        for key, num_tokens in self._left_out.items():
            room -= num_tokens
            if room < 0:
                break
            keys.append(key)
        for key in keys:
            del self._left_out[key]
        return keys

    def lost(self, key: str) -> None:
        """Note that the store has an object no more; a donor whose K/V lay there alone leaves, unless it is in use."""
        self._left_out.pop(key, None)
        donor_id = self._ids.get(key)
        if donor_id is None:
            return
        donor = self._catalogue.get(donor_id)
        if donor is not None and isinstance(donor.kv, StoredKV):
            if self._catalogue.is_pinned(donor_id):
                return  # whoever uses it finds out, and calls again
            self._catalogue.remove(donor_id)
        self.forget(donor_id)

    def clear(self) -> None:
        """Note that the catalogue was reset."""
        self._ids.clear()
        self._keys.clear()
        self._left_out.clear()

    def _join(self, record: DonorRecord) -> Donor | None:
        catalogue = self._catalogue
        is_admitted = record.num_tokens >= self._min_run and record.generation <= self._max_generation
        if record.key in self._ids or not is_admitted:
            return None
        if catalogue.num_tokens + record.num_tokens > catalogue.capacity_tokens:
            self._leave_out(record)
            return None
        donor = catalogue.add(
            KeyedNamespace(record.namespace_key),
            record.token_ids,
            StoredKV(record.key),
            generation=record.generation,
            start_position=record.start_position,
            front=record.front,
            is_far=True,
        ).donor
        if donor is not None:
            self._ids[record.key] = donor.donor_id
            self._keys[donor.donor_id] = record.key
        return donor

    def _leave_out(self, record: DonorRecord) -> None:
        self.num_left_out += 1
        self._left_out[record.key] = record.num_tokens
        if len(self._left_out) > _MOST_LEFT_OUT:
            del self._left_out[next(iter(self._left_out))]
