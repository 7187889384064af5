"""Index of long grams around anchors that many donors share: the few places of an anchor are not enough for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvgraft.donors.fingerprint import GRAM_TOKENS
from kvgraft.donors.postings import Hits, Places, PostingTable, num_buckets, rounds

if TYPE_CHECKING:
    from kvgraft.donors.arena import TokenArena
    from kvgraft.donors.fingerprint import Fingerprinter, Hashes, Positions, Tokens

_PASSAGES_PER_TOKEN = 2 / 9
"""Text that five donors or more have alike has a passage to enter for every fifth of their tokens, at most."""


class PassageIndex:
    """Lists, by passage, the donor that entered it last: every sequence of `length` tokens with a crowded anchor in it.

    An anchor lists few places. One more donor takes the place of an older one, although around the anchor that one may
    go on as no other does: forms have the same labels and each its own values. So what stands around the anchor in the
    older one is entered here. A run of `length` tokens is thus found by an anchor in it or as a passage.

    Complexity: `insert` is O(passages log passages), `remove` and `lookup` O(tokens given); all vectorised.
    """

    def __init__(self, capacity_tokens: int, max_rows: int, length: int) -> None:
        """Build an empty index for at most `max_rows` donors of `capacity_tokens` together."""
        self.length = length
        self._has_entries = np.zeros(max_rows, np.bool_)
        self._table = PostingTable(num_buckets(capacity_tokens * _PASSAGES_PER_TOKEN), max_postings=1)
        self.num_displaced = 0
        """Passages lost to other passages so far."""

    def __len__(self) -> int:
        return len(self._table)

    def lookup(self, hashes: Hashes) -> Hits:
        """Find the entries of passages with `hashes`."""
        return self._table.lookup(hashes)

    def insert(self, anchors: Places, arena: TokenArena, fingerprinter: Fingerprinter) -> None:
        """Enter all passages around `anchors`; their text is in the arena."""
        rows, begins, counts = self._passages_around(anchors, arena)
        if not len(rows):
            return
        self._has_entries[rows] = True
        # Hashed together, as if laid end to end; passages across two ends are left out.
        spans = counts + (self.length - 1)
        tokens = arena.tokens[_expanded(arena.starts[rows] + begins, spans)]
        hashes = fingerprinter.passages(tokens, self.length)[_expanded(np.cumsum(spans) - spans, counts)]
        places = Places(np.repeat(rows, counts), _expanded(begins, counts))
        self._enter(hashes, places)

    def remove(self, row: int, token_ids: Tokens, fingerprinter: Fingerprinter) -> int:
        """Clear the entries of a donor; return how many there were.

        Complexity: O(1) for a donor that never had any.
        """
        if not self._has_entries[row]:
            return 0
        count = self._table.remove(row, fingerprinter.passages(token_ids, self.length))
        self._has_entries[row] = False
        return count

    def count(self, row: int, token_ids: Tokens, fingerprinter: Fingerprinter) -> int:
        """Count the entries of a donor."""
        return self._table.count(row, fingerprinter.passages(token_ids, self.length))

    def clear(self) -> None:
        """Forget all entries."""
        self._table.clear()
        self._has_entries[:] = False

    def check(self) -> None:
        """Verify the table; raises `CorruptCacheError`."""
        self._table.check()

    def _passages_around(self, anchors: Places, arena: TokenArena) -> tuple[Positions, Positions, Positions]:
        """Return row, first position and number of consecutive passages that hold an anchor, overlaps joined."""
        order = np.lexsort((anchors.positions, anchors.rows))
        rows, positions = anchors.rows[order], anchors.positions[order]
        first = np.maximum(positions + (GRAM_TOKENS - self.length), 0)
        end = np.minimum(positions, arena.lengths[rows] - self.length) + 1
        kept = end > first
        rows, first, end = rows[kept], first[kept], end[kept]
        heads = np.ones(len(rows), np.bool_)
        heads[1:] = (rows[1:] != rows[:-1]) | (first[1:] > end[:-1])
        tails = np.append(heads[1:], True)[: len(rows)]
        return rows[heads], first[heads], end[tails] - first[heads]

    def _enter(self, hashes: Hashes, places: Places) -> None:
        hashes, index = np.unique(hashes, return_index=True)
        before, num_replaced = len(self), 0
        self._table.tick()
        for chosen in rounds(self._table.buckets(hashes)):
            taken = index[chosen]
            replaced = self._table.put(hashes[chosen], Places(places.rows[taken], places.positions[taken]))
            num_replaced += len(replaced.rows)
        self.num_displaced += len(hashes) - num_replaced - (len(self) - before)


def _expanded(firsts: Positions, counts: Positions) -> Positions:
    """Return `firsts[0], firsts[0] + 1, ...`, `counts[0]` of them, then those of the next."""
    offsets = np.cumsum(counts) - counts
    return np.repeat(firsts - offsets, counts) + np.arange(counts.sum())
