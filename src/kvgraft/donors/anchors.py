"""Where each anchor occurs: a set-associative table of fixed size from hash to (donor row, position)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvgraft.donors.fingerprint import WINDOW_GRAMS, Anchors, Hashes, Positions
from kvgraft.errors import CorruptCacheError

if TYPE_CHECKING:
    from numpy.typing import NDArray

WAYS = 8
"""Entries per bucket: eight 32-bit tags are half a cache line."""

MAX_POSTINGS = 4
"""Entries per key. Text that thousands of donors share is found in a few of the newest."""

_ANCHORS_PER_TOKEN = 2 / (WINDOW_GRAMS + 1)
_TARGET_LOAD = 3.0
"""Mean entries per bucket at full capacity; of Poisson-distributed buckets 0.4 % then overflow."""

_TAG_BITS = 32
_POSITION_BITS = 32
_POSITION_MASK = (1 << _POSITION_BITS) - 1
_NEVER = np.iinfo(np.int64).max


class Hits(NamedTuple):
    """Entries found for a query, ascending by `query`.

    Attributes:
        query: Index of the anchor asked for.
        rows: Donor row of the entry.
        positions: Position of the anchor in that donor.
    """

    query: Positions
    rows: Positions
    positions: Positions

    def where(self, mask: NDArray[np.bool_] | Positions) -> Hits:
        """Return the hits chosen by a mask or by ascending indices."""
        return Hits(self.query[mask], self.rows[mask], self.positions[mask])


class AnchorIndex:
    """Maps anchor hashes to the donors that have them.

    A key lives in one bucket of `WAYS` entries and nowhere else: a lookup reads half a cache line per anchor and a miss
    ends there. Of the key an entry keeps 32 bits other than those that chose the bucket; what little that confuses costs
    a comparison of tokens, nothing else. What is inserted takes a free way or displaces the oldest entry of its bucket,
    so the table never grows, never rebuilds and leaves no tombstones. A displaced anchor makes a donor harder to find,
    never wrong.

    Invariants (verified by `check`):
        - A way is in use if and only if its tag is not 0, and then its age is not 0.
        - A tag is in a bucket at most `MAX_POSTINGS` times, and not twice with the same row and position.
        - `len(self)` entries are in use.

    Complexity: `lookup`, `insert` and `remove` are O(anchors given), vectorised. Memory is 20 bytes per way, reserved
    at once and committed by the system as it is touched.
    """

    def __init__(self, num_buckets: int) -> None:
        """Build an empty table of `num_buckets`, a power of two."""
        assert num_buckets > 0
        assert num_buckets & (num_buckets - 1) == 0
        self._mask = np.uint64(num_buckets - 1)
        self._tags = np.zeros((num_buckets, WAYS), np.uint32)
        self._postings = np.zeros((num_buckets, WAYS), np.int64)
        self._ages = np.zeros((num_buckets, WAYS), np.int64)
        self._clock = 0
        self._num_entries = 0
        self.num_displaced = 0
        """Anchors lost to newer ones so far, or never listed because their donor repeats them or fills their bucket."""

    @classmethod
    def for_tokens(cls, capacity_tokens: int) -> AnchorIndex:
        """Build a table that holds the anchors of `capacity_tokens` with few displacements."""
        buckets = capacity_tokens * _ANCHORS_PER_TOKEN / _TARGET_LOAD
        return cls(1 << max(3, int(np.ceil(np.log2(max(buckets, 1))))))

    def __len__(self) -> int:
        return self._num_entries

    def lookup(self, hashes: Hashes) -> Hits:
        """Find all entries of `hashes`."""
        buckets = self._buckets(hashes)
        found = np.flatnonzero(self._tags.take(buckets, axis=0) == _tags(hashes)[:, None])
        query, way = np.divmod(found, WAYS)
        postings = self._postings.reshape(-1).take(buckets[query] * WAYS + way)
        return Hits(query, postings >> _POSITION_BITS, postings & _POSITION_MASK)

    def insert(self, row: int, anchors: Anchors) -> Hashes:
        """Add the anchors of donor `row`, of a hash that repeats the first and the last.

        Returns:
            The keys that `remove` needs to take the donor out again.
        """
        hashes, positions = _first_and_last(anchors)
        self._clock += 1
        self.num_displaced += len(anchors.hashes)
        for chosen in _rounds(self._buckets(hashes)):
            self._insert_distinct(row, hashes[chosen], positions[chosen])
        return hashes[np.concatenate([hashes[1:] != hashes[:-1], [True]])] if len(hashes) else hashes

    def remove(self, row: int, keys: Hashes) -> int:
        """Clear the entries of `row` under `keys`, as `insert` returned them; return how many there were."""
        own = self._own(row, keys)
        self._tags[own] = 0
        self._ages[own] = 0
        self._num_entries -= len(own[0])
        return len(own[0])

    def count(self, row: int, keys: Hashes) -> int:
        """Count the entries of `row` under `keys`; fewer than were inserted if newer ones displaced some."""
        return len(self._own(row, keys)[0])

    def clear(self) -> None:
        """Forget the anchors of all rows; the table keeps its size."""
        # Fresh zeros give the committed memory back, which overwriting would not.
        self._tags, self._ages = np.zeros_like(self._tags), np.zeros_like(self._ages)
        self._num_entries = 0

    def check(self) -> None:
        """Verify the invariants. Reads the whole table.

        Raises:
            CorruptCacheError: The first one that does not hold.
        """
        used = self._tags != 0
        if np.count_nonzero(used) != self._num_entries:
            raise CorruptCacheError(f"{np.count_nonzero(used)} anchors are in use, {self._num_entries} are counted")
        if ((self._ages != 0) != used).any():
            raise CorruptCacheError("a free anchor has an age, or one in use has none")
        buckets, ways = np.nonzero(used)
        keys = buckets << _TAG_BITS | self._tags[buckets, ways]
        if len(keys) and np.unique(keys, return_counts=True)[1].max() > MAX_POSTINGS:
            raise CorruptCacheError(f"a hash has more than {MAX_POSTINGS} postings")
        order = np.lexsort((self._postings[buckets, ways], keys))
        keys, postings = keys[order], self._postings[buckets, ways][order]
        if ((keys[1:] == keys[:-1]) & (postings[1:] == postings[:-1])).any():
            raise CorruptCacheError("an anchor of a donor is listed twice")

    def _buckets(self, hashes: Hashes) -> Positions:
        return (hashes & self._mask).view(np.int64)

    def _own(self, row: int, keys: Hashes) -> tuple[Positions, Positions]:
        """Bucket and way of the entries of `row` under distinct `keys`."""
        buckets = self._buckets(keys)
        rows = self._postings.take(buckets, axis=0) >> _POSITION_BITS
        index, way = np.nonzero((self._tags.take(buckets, axis=0) == _tags(keys)[:, None]) & (rows == row))
        return buckets[index], way

    def _insert_distinct(self, row: int, hashes: Hashes, positions: Positions) -> None:
        """Insert anchors that all belong to different buckets."""
        buckets = self._buckets(hashes)
        tags, ages = self._tags.take(buckets, axis=0), self._ages.take(buckets, axis=0)
        same = tags == _tags(hashes)[:, None]
        is_full = np.count_nonzero(same, axis=1) >= MAX_POSTINGS
        # A free way has age 0 and is therefore the oldest.
        way = np.where(is_full[:, None] & ~same, _NEVER, ages).argmin(axis=1)
        at = buckets, way
        num_free = int(np.count_nonzero(self._tags[at] == 0))
        self._num_entries += num_free
        self.num_displaced -= num_free
        self._tags[at] = _tags(hashes)
        self._postings[at] = row << _POSITION_BITS | positions
        self._ages[at] = self._clock


def _tags(hashes: Hashes) -> NDArray[np.uint32]:
    """Upper halves, never 0."""
    return np.maximum((hashes >> np.uint64(_TAG_BITS)).astype(np.uint32), np.uint32(1))


def _first_and_last(anchors: Anchors) -> Anchors:
    """Sort by hash and keep of equal hashes the first and the last position."""
    order = np.argsort(anchors.hashes, kind="stable")
    hashes, positions = anchors.hashes[order], anchors.positions[order]
    changes = hashes[1:] != hashes[:-1]
    kept = np.concatenate([[True], changes]) | np.concatenate([changes, [True]]) if len(order) else changes
    return Anchors(hashes[kept], positions[kept])


def _rounds(buckets: Positions) -> list[Positions]:
    """Split indices into rounds without a bucket twice; a bucket's entries beyond `WAYS` are left out."""
    order = np.argsort(buckets, kind="stable")
    ordered = buckets[order]
    rank = np.arange(len(order)) - np.searchsorted(ordered, ordered)
    return [order[rank == turn] for turn in range(min(WAYS, int(rank.max(initial=-1)) + 1))]
