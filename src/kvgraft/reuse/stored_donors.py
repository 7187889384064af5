"""Donors that stores hold: their catalogue entries, keys and holders. No I/O; drivers hand in what stores report."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

from kvgraft.donors import DonorQuery
from kvgraft.reuse.stored import StoredKV, is_stored
from kvgraft.types import KeyedNamespace

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from kvgraft.donors import Donor, DonorCatalogue
    from kvgraft.memory.store.record import DonorRecord
    from kvgraft.types import DonorId, Match

_Value = TypeVar("_Value")
_MOST_KEYS = 1 << 14
"""Keys without an entry that are remembered, per reason; a store of millions does not fill the memory."""
_RECALL_S = 30.0
"""Least time between two recalls: each reads heads, and a full catalogue leaves the same donors out again."""


class StoredDonors:
    """Keeps a catalogue in line with its stores, which go by their numbers; watches the catalogue. Not thread-safe.

    A donor of another process joins the catalogue with a `StoredKV` where there is room; it never evicts a resident one.
    A donor of this process is bound to its object once a store holds that, so that it can be demoted.
    """

    def __init__(
        self,
        catalogue: DonorCatalogue,
        *,
        min_run: int,
        max_generation: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Follow stores that hold nothing yet.

        Args:
            catalogue: Of resident and stored donors.
            min_run: Shortest donor.
            max_generation: Highest generation of a donor.
            clock: Seconds.
        """
        self._catalogue = catalogue
        self._min_run = min_run
        self._max_generation = max_generation
        self._clock = clock
        self._ids: dict[str, DonorId] = {}
        self._keys: dict[DonorId, str] = {}
        self._holders: dict[str, set[int]] = {}
        self._offered: dict[str, DonorId] = {}
        self._left_out: dict[str, int] = {}
        self._recall_at = clock()
        catalogue.watch(self)

    # Queries.

    def key_of(self, donor_id: DonorId) -> str | None:
        """Return the key under which a donor is stored as a whole, or None."""
        return self._keys.get(donor_id)

    def donor_of(self, key: str) -> DonorId | None:
        """Return the donor that is stored under `key`, or None."""
        return self._ids.get(key)

    def holders(self, key: str) -> Collection[int]:
        """Return the stores that hold an object."""
        return self._holders.get(key, ())

    def holder_of(self, donor_id: DonorId) -> int | None:
        """Return the first store that holds a donor as a whole, or None."""
        return min(self.holders(self._keys.get(donor_id, "")), default=None)

    def is_read(self, match: Match) -> bool:
        """Tell whether the K/V of a match have to be read."""
        return is_stored(self._catalogue.get(match.donor_id))

    def covers(self, record: DonorRecord) -> bool:
        """Tell whether stored donors have a text that is not registered yet, all but less than the shortest run."""
        if not self._keys:
            return False
        namespace = KeyedNamespace(record.namespace_key)
        matches = self._catalogue.find(DonorQuery(namespace, record.token_ids, max_generation=record.generation))
        return record.num_tokens - sum(m.length for m in matches if m.donor_id in self._keys) < self._min_run

    # What stores report.

    def hold(self, key: str, store: int) -> None:
        """Note that a store holds an object."""
        self._holders.setdefault(key, set()).add(store)

    def join(self, record: DonorRecord, store: int) -> Donor | None:
        """Note that a store holds an object; bind the donor of this process that was offered as it, or add one.

        Returns:
            The donor that joined the catalogue; None if it has the text already, does not admit it or has no room.

        Complexity: O(tokens of the record).
        """
        self.hold(record.key, store)
        offered = self._offered.pop(record.key, None)
        if offered is not None and self._catalogue.get(offered) is not None:
            self.bind(offered, record.key)
            return None
        is_admitted = record.num_tokens >= self._min_run and record.generation <= self._max_generation
        if record.key in self._ids or not is_admitted:
            return None
        if record.num_tokens > self._room():
            self.leave_out(record.key, record.num_tokens)
            return None
        donor = self._catalogue.add(
            KeyedNamespace(record.namespace_key),
            record.token_ids,
            StoredKV(record.key),
            generation=record.generation,
            start_position=record.start_position,
            front=record.front,
            is_stored=True,
        ).donor
        if donor is not None:
            self._note(donor.donor_id, record.key)
        return donor

    def lost(self, key: str, store: int | None = None) -> bool:
        """Note that a store, or every store, holds an object no more.

        Returns:
            Whether no store holds it now. A donor whose K/V lay there alone has left the catalogue then, unless it is
            pinned: its reader finds the object missing and reports it again.
        """
        left = self._holders.pop(key, set())
        left = set() if store is None else left - {store}
        if left:
            self._holders[key] = left
            return False
        self._left_out.pop(key, None)
        donor_id = self._ids.get(key)
        if donor_id is not None:
            is_alone = is_stored(self._catalogue.get(donor_id))
            if not (is_alone and self._catalogue.is_pinned(donor_id)):
                self._drop(key)
                if is_alone:
                    self._catalogue.remove(donor_id)
        return True

    # Donors of this process.

    def offer(self, donor_id: DonorId, key: str) -> bool:
        """Note that a donor is to be stored under `key`; False if a store holds that already, and the donor is bound."""
        if key in self._holders:
            self.bind(donor_id, key)
            return False
        _remember(self._offered, key, donor_id)
        return True

    def bind(self, donor_id: DonorId, key: str) -> None:
        """Note that a donor is stored as a whole; a stored entry of the same object leaves for it unless it is pinned."""
        if self._catalogue.get(donor_id) is None:
            return
        other = self._ids.get(key)
        if other is not None and other != donor_id:
            if not is_stored(self._catalogue.get(other)) or self._catalogue.is_pinned(other):
                return
            self._drop(key)
            self._catalogue.remove(other)
        self._note(donor_id, key)

    def demote(self, donor_id: DonorId) -> bool:
        """Make a resident donor a stored one; the caller frees its K/V. False if no store holds it."""
        key = self._keys.get(donor_id)
        if key is None or key not in self._holders:
            return False
        self._catalogue.rebind(donor_id, StoredKV(key), is_stored=True)
        return True

    def unbind(self, donor_id: DonorId) -> None:
        """Forget under which key a donor is stored, so that its object does not come back once the donor is removed."""
        key = self._keys.get(donor_id)
        if key is not None:
            self._drop(key)

    # Objects without an entry.

    def leave_out(self, key: str, num_tokens: int) -> None:
        """Remember an object that a store holds and that has no entry for lack of room."""
        if key in self._holders:
            _remember(self._left_out, key, num_tokens)

    def recall(self, reserved_tokens: int = 0, *, is_urgent: bool = False) -> list[str]:
        """Take the keys of objects that were left out and fit by now, the oldest first; feeds are to report them again.

        Args:
            reserved_tokens: Room of the catalogue that others are to have.
            is_urgent: Do not wait for the time between two recalls.

        Complexity: O(1) while the oldest does not fit.
        """
        if not self._left_out or not (is_urgent or self._clock() >= self._recall_at):
            return []
        room, keys = self._room() - reserved_tokens, []
        for key, num_tokens in self._left_out.items():
            room -= num_tokens
            if room < 0:
                break
            keys.append(key)
        self.recalled(keys)
        if keys:
            self._recall_at = self._clock() + _RECALL_S
        return keys

    def recalled(self, keys: Iterable[str]) -> None:
        """Note that feeds report these objects again; for ranks that follow the recall of another one."""
        for key in keys:
            self._left_out.pop(key, None)
            self._holders.pop(key, None)

    def clear(self) -> None:
        """Forget what stores hold: their spaces are left, or entered. Stored donors leave the catalogue, resident ones stay.

        Offers stay: a donor may be offered before the space is known in which it is written.
        """
        for donor_id in [each for each in self._keys if is_stored(self._catalogue.get(each))]:
            self._catalogue.remove(donor_id)
        for known in (self._ids, self._keys, self._holders, self._left_out):
            known.clear()

    # `DonorWatcher`.

    def donor_added(self, donor: Donor, before: object) -> None:
        """Do nothing: no object of it is known yet."""

    def donor_removed(self, donor: Donor) -> None:
        """Leave out the object of a donor that left the catalogue."""
        key = self._keys.get(donor.donor_id)
        if key is not None:
            self._drop(key)
            self.leave_out(key, donor.num_tokens)

    def donors_reset(self) -> None:
        """Forget everything."""
        self.clear()
        self._offered.clear()

    def _room(self) -> int:
        return self._catalogue.capacity_tokens - self._catalogue.num_tokens

    def _note(self, donor_id: DonorId, key: str) -> None:
        self.unbind(donor_id)
        self._left_out.pop(key, None)
        self._ids[key], self._keys[donor_id] = donor_id, key

    def _drop(self, key: str) -> None:
        del self._keys[self._ids.pop(key)]


def _remember(entries: dict[str, _Value], key: str, value: _Value) -> None:
    """Add an entry last; the first one goes if there are too many."""
    entries.pop(key, None)
    entries[key] = value
    if len(entries) > _MOST_KEYS:
        del entries[next(iter(entries))]
