"""Where grams stand in donors: a set-associative table of fixed size from hash to (donor row, position)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvgraft.errors import CorruptCacheError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvgraft.donors.fingerprint import Hashes, Positions

WAYS = 8
"""Entries per bucket: eight 32-bit tags are half a cache line."""

_TARGET_LOAD = 3.0
"""Mean entries per bucket at full capacity; of Poisson-distributed buckets 0.4 % then overflow."""

_TAG_BITS = 32
_POSITION_BITS = 32
_POSITION_MASK = (1 << _POSITION_BITS) - 1
_NEVER = np.iinfo(np.int64).max


class Places(NamedTuple):
    """Where grams stand in donors."""

    rows: Positions
    """Donor row."""
    positions: Positions
    """Index of the gram's first token in that donor."""


class Hits(NamedTuple):
    """Entries found for a query, ascending by `query`."""

    query: Positions
    """Index of the hash asked for."""
    rows: Positions
    positions: Positions
    """Position of the gram in that donor."""

    def where(self, mask: NDArray[np.bool_] | Positions) -> Hits:
        """Return the hits chosen by a mask or by ascending indices."""
        return Hits(self.query[mask], self.rows[mask], self.positions[mask])


class PostingTable:
    """Maps hashes to the donors that have them.

    A key lives in one bucket of `WAYS` entries and nowhere else: a lookup reads half a cache line per hash and a miss
    ends there. Of the key an entry keeps 32 bits other than those that chose the bucket; what little that confuses costs
    a comparison of tokens, nothing else. What is inserted takes a free way or displaces the oldest entry of its bucket,
    so the table never grows, never rebuilds and leaves no tombstones. A displaced entry makes a donor harder to find,
    never wrong.

    Invariants (verified by `check`):
        - A way is in use if and only if its tag is not 0, and then its age is not 0.
        - A tag is in a bucket at most `max_postings` times, and not twice with the same row and position.
        - `len(self)` entries are in use.

    Complexity: `lookup`, `put` and `remove` are O(hashes given), vectorised. Memory is 20 bytes per way, reserved
    at once and committed by the system as it is touched.
    """

    def __init__(self, num_buckets: int, *, max_postings: int) -> None:
        """Build an empty table of `num_buckets`, a power of two, with at most `max_postings` entries per key."""
        assert num_buckets > 0
        assert num_buckets & (num_buckets - 1) == 0
        self._mask = np.uint64(num_buckets - 1)
        self._tags = np.zeros((num_buckets, WAYS), np.uint32)
        self._postings = np.zeros((num_buckets, WAYS), np.int64)
        self._ages = np.zeros((num_buckets, WAYS), np.int64)
        self._max_postings = max_postings
        self._clock = 0
        self._num_entries = 0

    def __len__(self) -> int:
        return self._num_entries

    def lookup(self, hashes: Hashes) -> Hits:
        """Find all entries of `hashes`."""
        buckets = self.buckets(hashes)
        found = np.flatnonzero(self._tags.take(buckets, axis=0) == _tags(hashes)[:, None])
        query, way = np.divmod(found, WAYS)
        postings = self._postings.reshape(-1).take(buckets[query] * WAYS + way)
        return Hits(query, postings >> _POSITION_BITS, postings & _POSITION_MASK)

    def tick(self) -> None:
        """Let what is put from now on be newer than what was put before."""
        self._clock += 1

    def put(self, hashes: Hashes, places: Places) -> Places:
        """Add entries that all belong to different buckets; return those that their own key had no place for any more."""
        buckets = self.buckets(hashes)
        tags, ages = self._tags.take(buckets, axis=0), self._ages.take(buckets, axis=0)
        same = tags == _tags(hashes)[:, None]
        is_full = np.count_nonzero(same, axis=1) >= self._max_postings
        # A free way has age 0 and is therefore the oldest.
        way = np.where(is_full[:, None] & ~same, _NEVER, ages).argmin(axis=1)
        at = buckets, way
        crowded_out = self._postings[at][is_full]
        replaced = Places(crowded_out >> _POSITION_BITS, crowded_out & _POSITION_MASK)
        num_new = int(np.count_nonzero(self._tags[at] == 0))
        added, postings = _tags(hashes), places.rows << _POSITION_BITS | places.positions
        # From here on nothing is allocated: entries are all there, or none is.
        self._tags[at], self._postings[at], self._ages[at] = added, postings, self._clock
        self._num_entries += num_new
        return replaced

    def remove(self, row: int, keys: Hashes) -> int:
        """Clear the entries of `row` under `keys`, which may repeat; return how many there were."""
        own, tags, ages = self._own(row, keys), self._tags.reshape(-1), self._ages.reshape(-1)
        tags[own] = ages[own] = 0
        self._num_entries -= len(own)
        return len(own)

    def count(self, row: int, keys: Hashes) -> int:
        """Count the entries of `row` under `keys`; fewer than were put if newer ones displaced some."""
        return len(self._own(row, keys))

    def clear(self) -> None:
        """Forget all entries."""
        # Fresh zeros give the committed memory back, which overwriting would not.
        self._tags, self._ages = np.zeros_like(self._tags), np.zeros_like(self._ages)
        self._num_entries = 0

    def check(self) -> None:
        """Verify the invariants. Reads the whole table; raises `CorruptCacheError`."""
        tags, ages = self._tags.reshape(-1), self._ages.reshape(-1)
        used = np.flatnonzero(tags != 0)
        if len(used) != self._num_entries:
            raise CorruptCacheError(f"{len(used)} anchors are in use, {self._num_entries} are counted")
        if np.count_nonzero(ages) != len(used) or not ages[used].all():
            raise CorruptCacheError("a free anchor has an age, or one in use has none")
        keys, postings = used // WAYS << _TAG_BITS | tags[used], self._postings.reshape(-1)[used]
        if len(keys) and np.unique(keys, return_counts=True)[1].max() > self._max_postings:
            raise CorruptCacheError(f"a hash has more than {self._max_postings} postings")
        order = np.lexsort((postings, keys))
        keys, postings = keys[order], postings[order]
        if ((keys[1:] == keys[:-1]) & (postings[1:] == postings[:-1])).any():
            raise CorruptCacheError("an anchor of a donor is listed twice")

    def buckets(self, hashes: Hashes) -> Positions:
        """Return the bucket of each hash."""
        return (hashes & self._mask).view(np.int64)

    def _own(self, row: int, keys: Hashes) -> Positions:
        """Index of the entries of `row` under `keys`."""
        buckets = self.buckets(keys)
        found = np.flatnonzero(self._tags.take(buckets, axis=0) == _tags(keys)[:, None])
        query, way = np.divmod(found, WAYS)
        index = buckets[query] * WAYS + way
        return np.unique(index[self._postings.reshape(-1).take(index) >> _POSITION_BITS == row])


def num_buckets(num_entries: float) -> int:
    """Return how many buckets hold `num_entries` with few displacements."""
    return 1 << max(3, int(np.ceil(np.log2(max(num_entries / _TARGET_LOAD, 1)))))


def rounds(buckets: Positions) -> list[Positions]:
    """Split indices into rounds without a bucket twice; a bucket's indices beyond `WAYS` are left out."""
    order = np.argsort(buckets, kind="stable")
    ordered = buckets[order]
    rank = np.arange(len(order)) - np.searchsorted(ordered, ordered)
    return [order[rank == turn] for turn in range(min(WAYS, int(rank.max(initial=-1)) + 1))]


def _tags(hashes: Hashes) -> NDArray[np.uint32]:
    """Upper halves, never 0."""
    return np.maximum((hashes >> np.uint64(_TAG_BITS)).astype(np.uint32), np.uint32(1))
