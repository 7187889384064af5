"""The search for matches of a prompt: texts indexed by their tokens. Knows no K/V, no pins and no eviction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvgraft.donors.anchors import AnchorIndex, joined_hits, shared_places
from kvgraft.donors.arena import TokenArena
from kvgraft.donors.fingerprint import GRAM_TOKENS, GUARANTEED_RUN, Anchors, Fingerprinter, Hashes, Tokens
from kvgraft.donors.front import Fronts
from kvgraft.donors.in_place import in_place_first
from kvgraft.donors.matcher import Passages, find_runs
from kvgraft.donors.passages import PassageIndex
from kvgraft.donors.runs import Runs
from kvgraft.donors.tiling import tile
from kvgraft.donors.verify import Verifier
from kvgraft.errors import CorruptCacheError
from kvgraft.types import DonorId, Fidelity, Match

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from kvgraft.donors.donor import Donor
    from kvgraft.donors.fingerprint import Positions
    from kvgraft.donors.postings import Hits
    from kvgraft.donors.query import DonorQuery

_MOST_OFFSETS = 16
"""Places at which a text is compared with a donor as a whole; periodic text proposes many, and the first mostly fits."""

_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1


def id_in_row(row: int, epoch: int) -> DonorId:
    """Return the id of the donor that is number `epoch` in its row."""
    return DonorId(row | epoch << _ROW_BITS)


def row_of(donor_id: DonorId) -> int:
    """Return the row of a donor."""
    return donor_id & _ROW_MASK


@dataclass(slots=True)
class _Tenant:
    """A namespace that has texts."""

    number: int
    fingerprinter: Fingerprinter
    num_texts: int = 0


class _IndexedText(NamedTuple):
    """A donor's text, besides what the arrays hold by row."""

    namespace_key: bytes
    keys: Hashes
    front: bytes


class _Admission(NamedTuple):
    """Bounds of a search: the texts that it may use."""

    tenant: _Tenant
    max_generation: int | None
    with_stored: bool


class MatchFinder:
    """Texts of a catalogue, a row each, and the search for them. Not thread-safe.

    Invariants (verified by `check`):
        - Every text has its tokens in the arena, and every row of the arena has a text.
        - Every entry of the indexes is an anchor or a passage of a text.

    Attributes:
        index: Rows by anchor.
        passages: Rows by what stands around anchors that many texts have.
    """

    def __init__(self, capacity_tokens: int, *, min_run: int, secret: bytes) -> None:
        """Begin with no text; for the arguments see `DonorCatalogue`."""
        max_rows = capacity_tokens // GRAM_TOKENS
        self.index = AnchorIndex.for_tokens(capacity_tokens)
        self.passages = PassageIndex(capacity_tokens, max_rows, max(GUARANTEED_RUN, min_run))
        self._arena = TokenArena(capacity_tokens, max_rows)
        self._min_run = min_run
        self._secret = secret
        self._texts: dict[DonorId, _IndexedText] = {}
        self._tenants: dict[bytes, _Tenant] = {}
        self._num_tenants = 0
        self._num_rows = 0
        self._ids = np.zeros(max_rows, np.int64)
        self._generations = np.zeros(max_rows, np.int64)
        self._start_positions = np.zeros(max_rows, np.int64)
        self._tenant_of_row = np.zeros(max_rows, np.int64)
        self._is_stored = np.zeros(max_rows, np.bool_)

    @property
    def num_stored(self) -> int:
        """Texts with K/V in stores alone."""
        return int(self._is_stored.sum())

    @property
    def num_displaced(self) -> int:
        """Anchors and passages that the indexes could not keep so far."""
        return self.index.num_displaced + self.passages.num_displaced

    def anchors(self, namespace_key: bytes, tokens: Tokens) -> Anchors:
        """Return the anchors of a text of a namespace, for `insert`; changes nothing, and takes the most memory of all."""
        tenant = self._tenants.get(namespace_key)
        fingerprinter = Fingerprinter(namespace_key, self._secret) if tenant is None else tenant.fingerprinter
        return fingerprinter.anchors(tokens)

    def insert(self, donor: Donor, anchors: Anchors, *, is_stored: bool) -> None:
        """Index a donor's text, which has these anchors; where that fails, nothing of it is left.

        Complexity: O(its tokens).
        """
        row, key = row_of(donor.donor_id), donor.namespace.key
        tenant = self._tenants.get(key)
        if tenant is None:
            tenant = _Tenant(self._num_tenants + 1, Fingerprinter(key, self._secret))
        self._arena.store(row, donor.token_ids)
        self._ids[row] = donor.donor_id
        self._generations[row] = donor.generation
        self._start_positions[row] = donor.start_position
        self._tenant_of_row[row] = tenant.number
        self._is_stored[row] = is_stored
        try:
            keys, crowded_out = self.index.insert(row, anchors)
            self.passages.insert(crowded_out, self._arena, tenant.fingerprinter)
            text = _IndexedText(key, keys, donor.front)
        except BaseException:
            self.index.remove(row, anchors.hashes)
            self.passages.remove(row, donor.token_ids, tenant.fingerprinter)
            self._arena.remove(row)
            self._is_stored[row] = False
            raise
        self._num_rows = max(self._num_rows, row + 1)
        self._num_tenants = max(self._num_tenants, tenant.number)
        self._tenants[key] = tenant
        tenant.num_texts += 1
        self._texts[donor.donor_id] = text

    def remove(self, donor_id: DonorId) -> None:
        """Forget a text; where that fails, it is there as before, if harder to find. Complexity: O(own anchors)."""
        row, text = row_of(donor_id), self._texts[donor_id]
        tenant = self._tenants[text.namespace_key]
        self.index.remove(row, text.keys)
        self.passages.remove(row, self._arena.get(row), tenant.fingerprinter)
        self._arena.remove(row)
        del self._texts[donor_id]
        self._is_stored[row] = False
        tenant.num_texts -= 1
        if not tenant.num_texts:
            del self._tenants[text.namespace_key]

    def set_stored(self, donor_id: DonorId, is_stored: bool) -> None:
        """Note whether the K/V of a text lie in stores alone now."""
        self._is_stored[row_of(donor_id)] = is_stored

    def clear(self) -> None:
        """Forget all texts."""
        self.index.clear()
        self.passages.clear()
        self._arena.clear()
        self._texts.clear()
        self._tenants.clear()
        self._is_stored[:] = False

    def find(self, query: DonorQuery) -> list[Match]:
        """See `DonorCatalogue.find`."""
        namespace_key, tokens, start = query.namespace.key, query.tokens, query.start
        tenant = self._tenants.get(namespace_key)
        if tenant is None or len(tokens) - start < self._min_run:
            return []
        admission = _Admission(tenant, query.max_generation, query.with_stored)
        runs = self._runs(tokens, start, query.proposed, admission)
        runs = runs.clipped(start, self._min_run)
        if not runs.num_runs:
            return []
        ranks = 2 * self._generations[runs.rows] + self._is_stored[runs.rows]
        pieces = tile(runs, ranks, min_run=self._min_run)
        in_place = self._in_place(runs, tokens, Fronts(namespace_key, tokens))
        is_exact = self._generations[in_place.rows] == 0
        matches: list[Match] = []
        for fidelity, proved in ((Fidelity.EXACT, in_place.take(is_exact)), (Fidelity.CONTINUED, in_place)):
            left = proved.outside(matches, self._min_run)
            is_stored = self._is_stored[left.rows]
            chosen, pieces = in_place_first(left, is_stored, pieces, start=start, min_run=self._min_run)
            matches += self._matches(chosen, fidelity)
        matches += self._matches(pieces, Fidelity.SHIFTED)
        return sorted(matches, key=lambda match: match.target_start)

    def inside(self, namespace_key: bytes, tokens: Tokens, *, min_generation: int) -> list[DonorId]:
        """See `DonorCatalogue.inside`."""
        tenant = self._tenants.get(namespace_key)
        if tenant is None or not (self._generations[: self._num_rows] >= min_generation).any():
            return []
        anchors = tenant.fingerprinter.anchors(tokens)
        hits = self._admitted(self.index.lookup(anchors.hashes), _Admission(tenant, None, with_stored=True))
        hits = hits.where(self._generations[hits.rows] >= min_generation)
        offsets: dict[int, list[int]] = {}
        starts = (anchors.positions[hits.query] - hits.positions).tolist()
        for row, offset in zip(hits.rows.tolist(), starts, strict=True):
            offsets.setdefault(row, []).append(offset)
        rows = (row for row, proposed in offsets.items() if self._stands_in(row, tokens, proposed))
        return [DonorId(int(self._ids[row])) for row in rows]

    def check(self, donors: Mapping[DonorId, Donor]) -> None:
        """Verify every invariant, of the parts too, and that the texts are those of `donors`. Reads everything.

        Raises:
            CorruptCacheError: The first one that does not hold.
        """
        for part in (self.index, self.passages, self._arena):
            part.check()
        if set(self._texts) != set(donors):
            raise CorruptCacheError("texts and donors are not the same")
        if set(np.flatnonzero(self._arena.lengths).tolist()) != {row_of(donor_id) for donor_id in donors}:
            raise CorruptCacheError("rows in use and donors are not the same")
        num_anchors = num_passages = 0
        for donor_id, text in self._texts.items():
            self._check_text(donors[donor_id])
            row, fingerprinter = row_of(donor_id), self._tenants[text.namespace_key].fingerprinter
            num_anchors += self.index.count(row, text.keys)
            num_passages += self.passages.count(row, self._arena.get(row), fingerprinter)
        if (num_anchors, num_passages) != (len(self.index), len(self.passages)):
            raise CorruptCacheError(
                f"the indexes have {len(self.index)} anchors and {len(self.passages)} passages, "
                f"of which donors have {num_anchors} and {num_passages}"
            )
        if sum(tenant.num_texts for tenant in self._tenants.values()) != len(donors):
            raise CorruptCacheError("donors by namespace do not sum up")

    def _check_text(self, donor: Donor) -> None:
        row = row_of(donor.donor_id)
        if donor.donor_id != self._ids[row]:
            raise CorruptCacheError(f"donor {donor.donor_id} is not the one in row {row}")
        if not np.array_equal(self._arena.get(row), donor.token_ids):
            raise CorruptCacheError(f"the tokens of donor {donor.donor_id} have changed")
        tenant = self._tenants.get(donor.namespace.key)
        if tenant is None or tenant.number != self._tenant_of_row[row] or donor.generation != self._generations[row]:
            raise CorruptCacheError(f"donor {donor.donor_id} is listed under another namespace or generation")

    def _runs(self, tokens: Tokens, start: int, proposed: Collection[DonorId], admission: _Admission) -> Runs:
        """Find verified runs of a prompt, some of which may begin before `start`."""
        # Text before `start` belongs to the search as far as an anchor of a clipped run may lie in it.
        lowest = max(0, start - GRAM_TOKENS)
        fingerprinter = admission.tenant.fingerprinter
        anchors = fingerprinter.anchors(tokens[lowest:])
        listed = self.index.lookup(anchors.hashes)
        directly = self._shared_with(proposed, anchors, admission)
        if not len(listed.query) and not directly:
            return Runs.empty()
        hits = self._admitted(listed, admission)
        hits = joined_hits([hits, *directly]) if directly else hits
        anchors = Anchors(anchors.hashes, anchors.positions + lowest)

        def passages_at(starts: Positions) -> Hits:
            hashes = fingerprinter.passages(tokens, self.passages.length)
            return self._admitted(self.passages.lookup(hashes[starts]), admission)

        # Of an anchor with two places there may have been more, of donors that may be used, listed or not.
        crowded = anchors.positions[listed.query[1:][listed.query[1:] == listed.query[:-1]]]
        passages = Passages(self.passages.length, start, crowded, passages_at)
        return find_runs(anchors, hits, passages, self._arena, Verifier(tokens, self._arena, lowest=lowest))

    def _admitted(self, hits: Hits, admission: _Admission) -> Hits:
        """Keep the hits that a search may use."""
        tenant, max_generation, with_stored = admission
        admitted = self._tenant_of_row[hits.rows] == tenant.number
        if not with_stored:
            admitted &= ~self._is_stored[hits.rows]
        if max_generation is not None:
            admitted &= self._generations[hits.rows] <= max_generation
        return hits if admitted.all() else hits.where(admitted)

    def _shared_with(self, proposed: Collection[DonorId], anchors: Anchors, admission: _Admission) -> list[Hits]:
        """Find where anchors of a prompt stand in each of `proposed` that may be used."""
        tenant, max_generation, _ = admission
        rows = [row_of(donor_id) for donor_id in dict.fromkeys(proposed) if donor_id in self._texts]
        return [
            shared_places(anchors, row, tenant.fingerprinter.anchors(self._arena.get(row)))
            for row in rows
            if self._tenant_of_row[row] == tenant.number
            and (max_generation is None or self._generations[row] <= max_generation)
        ]

    def _stands_in(self, row: int, tokens: Tokens, offsets: Sequence[int]) -> bool:
        """Compare a text with `tokens` from each of a few of `offsets` on; return whether one fits."""
        own = self._arena.get(row)
        few = list(dict.fromkeys(offset for offset in offsets if 0 <= offset <= len(tokens) - len(own)))[:_MOST_OFFSETS]
        return any(np.array_equal(own, tokens[offset : offset + len(own)]) for offset in few)

    def _in_place(self, runs: Runs, tokens: Tokens, fronts: Fronts) -> Runs:
        """Return the runs whose donors encoded them at the prompt's positions, and after the prompt's tokens.

        The donor's own are compared, of those before it the digest. Where a donor attended to nothing approximate, these are
        the K/V of a full prefill of the prompt.
        """
        begins = self._start_positions[runs.rows]
        candidates = np.flatnonzero(self._arena.starts[runs.rows] - runs.diagonals == begins)
        proved = []
        for index in candidates[np.argsort(begins[candidates], kind="stable")].tolist():
            row, start, begin = int(runs.rows[index]), int(runs.starts[index]), int(begins[index])
            same_front = self._texts[DonorId(int(self._ids[row]))].front == fronts.up_to(begin)
            if same_front and np.array_equal(self._arena.get(row)[: start - begin], tokens[begin:start]):
                proved.append(index)
        return runs.take(np.array(proved, np.int64))

    def _matches(self, pieces: Runs, fidelity: Fidelity) -> list[Match]:
        ids = self._ids[pieces.rows]
        donor_starts = pieces.starts + pieces.diagonals - self._arena.starts[pieces.rows]
        columns = pieces.starts, ids, donor_starts, pieces.ends - pieces.starts, self._generations[pieces.rows]
        return [
            Match(start, DonorId(donor_id), donor_start, length, fidelity, generation)
            for start, donor_id, donor_start, length, generation in zip(*(c.tolist() for c in columns), strict=True)
        ]
