"""Index of donors by anchor: the short grams by which a lookup begins."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvgraft.donors.fingerprint import WINDOW_GRAMS, Anchors, Hashes, Positions
from kvgraft.donors.postings import Hits, Places, PostingTable, num_buckets, rounds

MAX_POSTINGS = 2
"""Entries per key. What else donors have around an anchor that so many share is found by its passages."""

_ANCHORS_PER_TOKEN = 2 / (WINDOW_GRAMS + 1)


class Inserted(NamedTuple):
    """The result of inserting anchors."""

    keys: Hashes
    """What `AnchorIndex.remove` needs to take the donor out again."""
    crowded_out: Places
    """Where donors have anchors for which there is no place any more, because this donor repeats them or newer donors have
    them too."""


class AnchorIndex:
    """Lists, by anchor, the newest `MAX_POSTINGS` places, of one donor at most the first and the last.

    Complexity: `lookup`, `insert` and `remove` are O(anchors given), vectorised.
    """

    def __init__(self, num_buckets: int) -> None:
        """Build an empty index of `num_buckets`, a power of two."""
        self._table = PostingTable(num_buckets, max_postings=MAX_POSTINGS)
        self.num_displaced = 0
        """Anchors lost so far because others filled their bucket."""

    @classmethod
    def for_tokens(cls, capacity_tokens: int) -> AnchorIndex:
        """Build an index that holds the anchors of `capacity_tokens` with few displacements."""
        return cls(num_buckets(capacity_tokens * _ANCHORS_PER_TOKEN))

    def __len__(self) -> int:
        return len(self._table)

    def lookup(self, hashes: Hashes) -> Hits:
        """Find all entries of `hashes`."""
        return self._table.lookup(hashes)

    def insert(self, row: int, anchors: Anchors) -> Inserted:
        """Add the anchors of donor `row`, of a hash that repeats the first and the last."""
        (hashes, positions), repeats = _first_and_last(anchors)
        before, replaced = len(self), [Places(np.empty(0, np.int64), np.empty(0, np.int64))]
        self._table.tick()
        for chosen in rounds(self._table.buckets(hashes)):
            places = Places(np.full(len(chosen), row), positions[chosen])
            replaced.append(self._table.put(hashes[chosen], places))
        rows, positions = map(np.concatenate, zip(*replaced, strict=True))
        self.num_displaced += len(hashes) - len(rows) - (len(self) - before)
        crowded_out = Places(np.append(rows, np.full(len(repeats), row)), np.append(positions, repeats))
        keys = hashes[np.concatenate([hashes[1:] != hashes[:-1], [True]])] if len(hashes) else hashes
        return Inserted(keys, crowded_out)

    def remove(self, row: int, keys: Hashes) -> int:
        """Clear the entries of `row` under `keys`, as `insert` returned them; return how many there were."""
        return self._table.remove(row, keys)

    def count(self, row: int, keys: Hashes) -> int:
        """Count the entries of `row` under `keys`; fewer than were inserted if newer ones displaced some."""
        return self._table.count(row, keys)

    def clear(self) -> None:
        """Forget all entries."""
        self._table.clear()

    def check(self) -> None:
        """Verify the table; raises `CorruptCacheError`."""
        self._table.check()


def shared_places(anchors: Anchors, row: int, own: Anchors) -> Hits:
    """Find where anchors of a prompt stand in one donor, of each the first and the last place; the index is not asked.

    Args:
        anchors: Of the prompt.
        row: Donor row.
        own: Anchors of that donor.

    Complexity: O(a log a) for a anchors of both.
    """
    (hashes, positions), _ = _first_and_last(own)
    first = np.searchsorted(hashes, anchors.hashes)
    count = np.searchsorted(hashes, anchors.hashes, side="right") - first
    once, twice = np.flatnonzero(count), np.flatnonzero(count > 1)
    query, place = np.append(once, twice), np.append(first[once], first[twice] + 1)
    return joined_hits([Hits(query, np.full(len(query), row), positions[place])])


def joined_hits(hits: list[Hits]) -> Hits:
    """Put hits together, ascending by query; of one query the earlier given come first."""
    together = Hits(*(np.concatenate(parts) for parts in zip(*hits, strict=True)))
    return together.where(np.argsort(together.query, kind="stable"))


def _first_and_last(anchors: Anchors) -> tuple[Anchors, Positions]:
    """Sort by hash and keep of equal hashes the first and the last position; return the positions left out too."""
    order = np.argsort(anchors.hashes, kind="stable")
    hashes, positions = anchors.hashes[order], anchors.positions[order]
    changes = hashes[1:] != hashes[:-1]
    kept = np.concatenate([[True], changes]) | np.concatenate([changes, [True]]) if len(order) else changes
    return Anchors(hashes[kept], positions[kept]), positions[~kept]
