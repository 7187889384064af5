"""Which texts are donors, which of them share text with a prompt, and which leaves when room is short. Holds no K/V."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from kvgraft.config import check_host_memory
from kvgraft.donors.anchors import AnchorIndex, joined_hits, shared_places
from kvgraft.donors.arena import TokenArena
from kvgraft.donors.donor import Donor
from kvgraft.donors.eviction import DonorQueue
from kvgraft.donors.exact import exact_first
from kvgraft.donors.fingerprint import GRAM_TOKENS, GUARANTEED_RUN, Anchors, Fingerprinter, Hashes, Tokens
from kvgraft.donors.front import FRONT_BYTES, Fronts
from kvgraft.donors.matcher import Passages, find_runs
from kvgraft.donors.passages import PassageIndex
from kvgraft.donors.tiling import tile
from kvgraft.donors.verify import Verifier
from kvgraft.errors import CapacityError, ConfigError, CorruptCacheError
from kvgraft.types import DonorId, KeyedNamespace, Match, Namespace

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from numpy.typing import ArrayLike

    from kvgraft.donors.fingerprint import Positions
    from kvgraft.donors.postings import Hits
    from kvgraft.donors.runs import Runs

_SECRET_BYTES = 32
_PROCESS_SECRET = os.urandom(_SECRET_BYTES)
"""Keys the hashes of all catalogues of this process that are given no other secret."""

BYTES_PER_TOKEN = 48
"""Host memory of a catalogue per token of its capacity, at most; most of it is reserved at once and committed as it fills."""

_MOST_OFFSETS = 16
"""Places at which a text is compared with a donor as a whole; periodic text proposes many, and the first mostly does."""

_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1


def new_secret() -> bytes:
    """Make a secret for catalogues of several processes that must behave alike."""
    return os.urandom(_SECRET_BYTES)


class DonorWatcher(Protocol):
    """Hears which donors there are; must not change the catalogue, and must not raise."""

    def donor_added(self, donor: Donor) -> None:
        """A text has become a donor."""

    def donor_removed(self, donor: Donor) -> None:
        """A donor is gone."""

    def donors_reset(self) -> None:
        """All donors are gone."""


class AddResult(NamedTuple):
    """What became of a text that was offered.

    Attributes:
        donor: The new donor, or None if the text is shorter than a k-gram and could never be found.
        evicted: Donors that had to leave; the owner frees their K/V.
    """

    donor: Donor | None
    evicted: tuple[Donor, ...]


@dataclass(slots=True)
class _Entry:
    """What the catalogue knows of a donor besides what it tells."""

    donor: Donor
    keys: Hashes
    num_pins: int = 0
    saved_tokens: int = 0

    @property
    def value(self) -> float:
        """Tokens saved per token held, the registration counted as one use."""
        return 1 + self.saved_tokens / self.donor.num_tokens


@dataclass(slots=True)
class _Tenant:
    """A namespace that has donors."""

    number: int
    fingerprinter: Fingerprinter
    num_donors: int = 0


class DonorCatalogue:
    """Finds, for a prompt, donors with the same tokens at any offset.

    The catalogue decides and its owner frees: donors leave through results, and `kv` is never looked at. Sizes are in
    tokens. Not thread-safe.

    Invariants (verified by `check`):
        - `num_tokens` is the sum of the donors' lengths and at most `capacity_tokens`.
        - Every donor has a row with its tokens in the arena, and every row in use has a donor.
        - Every entry of the index is an anchor of a donor.
        - A donor waits for eviction if and only if it is not pinned.

    Complexity: `find` is O(n log n) in the length of the prompt, whatever is registered; `add` and `remove` are O(n) in
    the donor's length plus O(log donors).
    """

    def __init__(self, capacity_tokens: int, *, min_run: int = GRAM_TOKENS, secret: bytes | None = None) -> None:
        """Build an empty catalogue.

        Args:
            capacity_tokens: Tokens that all donors may have together; about 30 bytes of host memory each, and
                up to 24 more as far as many have the same text.
            min_run: Shortest match that `find` gives.
            secret: Keys all hashes, together with the namespace. Which of equally good donors `find` names, and which
                runs shorter than 32 tokens it finds, depends on it: catalogues that must behave alike in several
                processes need the same one (`new_secret`), handed over where nobody can read it. By default one that all
                catalogues of this process share.

        Raises:
            ConfigError: An argument is below a k-gram of 16 tokens, the secret does not have 32 bytes, or the catalogue would
                take more memory than there is.
        """
        if secret is None:
            secret = _PROCESS_SECRET
        if len(secret) != _SECRET_BYTES:
            raise ConfigError(f"secret must have {_SECRET_BYTES} bytes, not {len(secret)}; new_secret() makes one")
        for name, value in (("capacity_tokens", capacity_tokens), ("min_run", min_run)):
            if value < GRAM_TOKENS:
                raise ConfigError(f"{name} must be at least {GRAM_TOKENS}, not {value}")
        check_host_memory("donor_tokens", capacity_tokens, BYTES_PER_TOKEN)
        max_rows = capacity_tokens // GRAM_TOKENS
        self._secret = secret
        self._capacity = capacity_tokens
        self._min_run = min_run
        self._index = AnchorIndex.for_tokens(capacity_tokens)
        self._passages = PassageIndex(capacity_tokens, max_rows, max(GUARANTEED_RUN, min_run))
        self._arena = TokenArena(capacity_tokens, max_rows)
        self._queue = DonorQueue()
        self._entries: dict[DonorId, _Entry] = {}
        self._tenants: dict[bytes, _Tenant] = {}
        self._num_tenants = 0
        self._num_rows = 0
        self._free_rows: list[int] = []
        self._epochs = np.zeros(max_rows, np.int64)
        self._generations = np.zeros(max_rows, np.int64)
        self._start_positions = np.zeros(max_rows, np.int64)
        self._tenant_of_row = np.zeros(max_rows, np.int64)
        self._is_far = np.zeros(max_rows, np.bool_)
        self._num_tokens = 0
        self._pinned_tokens = 0
        self._watchers: list[DonorWatcher] = []

    @property
    def capacity_tokens(self) -> int:
        """Most tokens that all donors may have together."""
        return self._capacity

    @property
    def num_tokens(self) -> int:
        """Tokens of all donors."""
        return self._num_tokens

    @property
    def num_far(self) -> int:
        """Donors whose K/V lie far away."""
        return int(self._is_far.sum())

    @property
    def num_anchors(self) -> int:
        """Entries of the index."""
        return len(self._index)

    @property
    def num_passages(self) -> int:
        """Entries for what stands around anchors that many donors have."""
        return len(self._passages)

    @property
    def num_displaced_anchors(self) -> int:
        """Anchors and passages that the indexes could not keep so far; many in proportion to all mean missed matches."""
        return self._index.num_displaced + self._passages.num_displaced

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Donor]:
        """Yield all donors in order of registration."""
        return (entry.donor for entry in self._entries.values())

    def watch(self, watcher: DonorWatcher) -> None:
        """Tell `watcher` of donors that come and go from now on."""
        self._watchers.append(watcher)

    def find(
        self,
        namespace: Namespace | KeyedNamespace,
        token_ids: ArrayLike,
        *,
        start: int = 0,
        max_generation: int | None = None,
        proposed: Collection[DonorId] = (),
        with_far: bool = True,
    ) -> list[Match]:
        """Find which tokens at or behind `start` donors have, at any offset. Changes nothing.

        Every run of at least 32 tokens that the prompt shares with a donor is found, unless newer text displaced
        its anchors; of shorter ones, down to `min_run`, some are. Where a donor was computed exactly, behind what the prompt
        has in front of it, too, it is taken before any other, as far as it reaches: it costs no fidelity.

        Args:
            namespace: Only its donors are considered.
            token_ids: The prompt.
            start: Length of the exact prefix; matches are clipped to what follows.
            max_generation: Highest generation of a donor; None for any.
            proposed: Donors that may have some of the text although the indexes have lost it. Their anchors are compared with
                the prompt's directly, in O(n log n) of their tokens; those of other namespaces, of a higher generation and
                those that are gone are ignored.
            with_far: Whether donors count that were added as far. Of equal runs of one generation the nearer one is taken.

        Returns:
            Sorted, disjoint matches of at least `min_run` tokens, few and long ones preferred.

        Raises:
            ConfigError: `token_ids` are not a one-dimensional sequence of 32-bit integers.
        """
        tokens = _as_tokens(token_ids)
        tenant = self._tenants.get(namespace.key)
        if tenant is None or len(tokens) - start < self._min_run:
            return []
        # Text before `start` belongs to the search as far as an anchor of a clipped run may lie in it.
        lowest = max(0, start - GRAM_TOKENS)
        anchors = tenant.fingerprinter.anchors(tokens[lowest:])
        listed = self._index.lookup(anchors.hashes)
        directly = self._shared_with(proposed, anchors, tenant, max_generation)
        if not len(listed.query) and not directly:
            return []
        hits = self._admitted(listed, tenant, max_generation, with_far)
        hits = joined_hits([hits, *directly]) if directly else hits
        verifier = Verifier(tokens, self._arena, lowest=lowest)
        anchors = Anchors(anchors.hashes, anchors.positions + lowest)

        def passages_at(starts: Positions) -> Hits:
            hashes = tenant.fingerprinter.passages(tokens, self._passages.length)
            return self._admitted(self._passages.lookup(hashes[starts]), tenant, max_generation, with_far)

        # Of an anchor with two places there may have been more, of donors that may be used, whichever are listed.
        crowded = anchors.positions[listed.query[1:][listed.query[1:] == listed.query[:-1]]]
        passages = Passages(self._passages.length, start, crowded, passages_at)
        runs = find_runs(anchors, hits, passages, self._arena, verifier)
        runs = runs.clipped(start, self._min_run)
        ranks = 2 * self._generations[runs.rows] + self._is_far[runs.rows]
        pieces = tile(runs, ranks, min_run=self._min_run)
        proved = self._proved(runs, tokens, Fronts(namespace.key, tokens))
        exact, others = exact_first(proved, self._is_far[proved.rows], pieces, start=start, min_run=self._min_run)
        matches = [*self._matches(exact, is_exact=True), *self._matches(others)]
        return sorted(matches, key=lambda match: match.target_start)

    def inside(
        self, namespace: Namespace | KeyedNamespace, token_ids: ArrayLike, *, min_generation: int
    ) -> list[Donor]:
        """Find donors of at least `min_generation` all of whose text stands in `token_ids`, at any offset. Changes nothing.

        Of donors with the same anchors those are found that the index lists, the newest.

        Complexity: O(n), and the tokens of what is proposed.
        """
        tokens = _as_tokens(token_ids)
        tenant = self._tenants.get(namespace.key)
        if tenant is None or not (self._generations[: self._num_rows] >= min_generation).any():
            return []
        anchors = tenant.fingerprinter.anchors(tokens)
        hits = self._admitted(self._index.lookup(anchors.hashes), tenant, None, with_far=True)
        hits = hits.where(self._generations[hits.rows] >= min_generation)
        offsets: dict[int, list[int]] = {}
        for row, offset in zip(
            hits.rows.tolist(), (anchors.positions[hits.query] - hits.positions).tolist(), strict=True
        ):
            offsets.setdefault(row, []).append(offset)
        rows = (row for row, proposed in offsets.items() if self._stands_in(row, tokens, proposed))
        return [self._donor_of(row) for row in rows]

    def add(
        self,
        namespace: Namespace | KeyedNamespace,
        token_ids: ArrayLike,
        kv: object,
        *,
        generation: int = 0,
        start_position: int = 0,
        front: bytes = b"",
        is_far: bool = False,
    ) -> AddResult:
        """Register a text, making room by evicting what is worth least.

        Args:
            namespace: Who may reuse it.
            token_ids: The text; copied.
            kv: Handle of its K/V; goes on belonging to the caller.
            generation: See `Donor`.
            start_position: See `Donor`.
            front: See `Donor`.
            is_far: Whether its K/V lie where reading them takes time; others with the same text are preferred.

        Returns:
            AddResult: `donor` is None for a text shorter than 16 tokens; nothing changed then.

        Raises:
            CapacityError: The text is longer than the catalogue, or pinned donors leave too little room. Nothing has
                changed then.
            ConfigError: `token_ids` are not a one-dimensional sequence of 32-bit integers, or `front` is no digest.
        """
        if len(front) not in (0, FRONT_BYTES):
            raise ConfigError(
                f"front must have {FRONT_BYTES} bytes or none, not {len(front)}; front_digest() makes one"
            )
        tokens = _as_tokens(token_ids).copy()
        tokens.flags.writeable = False
        if len(tokens) < GRAM_TOKENS:
            return AddResult(None, ())
        if len(tokens) > self._capacity - self._pinned_tokens:
            raise CapacityError(
                f"a donor of {len(tokens)} tokens does not fit: the catalogue holds {self._capacity}, "
                f"of which {self._pinned_tokens} are pinned; raise its capacity"
            )
        evicted = self.evict(self._num_tokens + len(tokens) - self._capacity)
        tenant = self._tenant(namespace)
        row = self._take_row()
        donor_id = DonorId(row | int(self._epochs[row]) << _ROW_BITS)
        donor = Donor(donor_id, namespace, tokens, kv, generation, start_position, front)
        self._arena.store(row, tokens)
        self._generations[row] = generation
        self._start_positions[row] = start_position
        self._tenant_of_row[row] = tenant.number
        self._is_far[row] = is_far
        keys, crowded_out = self._index.insert(row, tenant.fingerprinter.anchors(tokens))
        self._passages.insert(crowded_out, self._arena, tenant.fingerprinter)
        entry = _Entry(donor, keys)
        self._entries[donor_id] = entry
        self._queue.put(donor_id, entry.value)
        self._num_tokens += len(tokens)
        tenant.num_donors += 1
        for watcher in self._watchers:
            watcher.donor_added(donor)
        return AddResult(donor, tuple(evicted))

    def get(self, donor_id: DonorId) -> Donor | None:
        """Return a donor, or None if it is gone."""
        entry = self._entries.get(donor_id)
        return None if entry is None else entry.donor

    def remove(self, donor_id: DonorId) -> Donor:
        """Forget a donor, pinned or not, and return it for the owner to free its K/V.

        Raises:
            CorruptCacheError: There is no such donor.

        Complexity: O(own anchors).
        """
        entry = self._entry(donor_id)
        row = donor_id & _ROW_MASK
        self._index.remove(row, entry.keys)
        self._passages.remove(row, entry.donor.token_ids, self._tenants[entry.donor.namespace.key].fingerprinter)
        self._arena.remove(row)
        self._queue.discard(donor_id)
        self._is_far[row] = False
        del self._entries[donor_id]
        self._epochs[row] += 1
        self._free_rows.append(row)
        self._num_tokens -= entry.donor.num_tokens
        self._pinned_tokens -= entry.donor.num_tokens if entry.num_pins else 0
        self._leave_tenant(entry.donor.namespace)
        for watcher in self._watchers:
            watcher.donor_removed(entry.donor)
        return entry.donor

    def evict(self, num_tokens: int) -> list[Donor]:
        """Drop what is worth least, never what is pinned, until `num_tokens` are freed or nothing is left to drop.

        Returns:
            The donors dropped, least valuable first; the owner frees their K/V.
        """
        evicted = []
        while num_tokens > 0 and len(self._queue):
            donor = self.remove(self._queue.pop())
            num_tokens -= donor.num_tokens
            evicted.append(donor)
        return evicted

    def victims(self) -> Iterator[Donor]:
        """Yield donors in the order in which `evict` would drop them. The catalogue must not change meanwhile.

        Complexity: O(k log k) for the first k.
        """
        return (self._entries[donor_id].donor for donor_id in self._queue)

    def pin(self, donor_id: DonorId) -> None:
        """Keep a donor from eviction until as many `unpin` follow.

        Raises:
            CorruptCacheError: There is no such donor.
        """
        entry = self._entry(donor_id)
        entry.num_pins += 1
        if entry.num_pins == 1:
            self._queue.discard(donor_id)
            self._pinned_tokens += entry.donor.num_tokens

    def unpin(self, donor_id: DonorId) -> None:
        """Give one pin back.

        Raises:
            CorruptCacheError: There is no such donor, or it is not pinned.
        """
        entry = self._entry(donor_id)
        if not entry.num_pins:
            raise CorruptCacheError(f"donor {donor_id} is not pinned")
        entry.num_pins -= 1
        if not entry.num_pins:
            self._pinned_tokens -= entry.donor.num_tokens
            self._queue.put(donor_id, entry.value)

    def is_pinned(self, donor_id: DonorId) -> bool:
        """Tell whether a donor is registered and pinned."""
        entry = self._entries.get(donor_id)
        return entry is not None and entry.num_pins > 0

    def record_hit(self, donor_id: DonorId, num_tokens: int) -> None:
        """Count `num_tokens` that a donor saved; it becomes more valuable. A donor that is gone is ignored."""
        entry = self._entries.get(donor_id)
        if entry is None:
            return
        entry.saved_tokens += num_tokens
        if not entry.num_pins:
            self._queue.put(donor_id, entry.value)

    def value(self, donor_id: DonorId) -> float:
        """Tokens saved per token held, the registration counted as one use; 0 for a donor that is gone."""
        entry = self._entries.get(donor_id)
        return 0.0 if entry is None else entry.value

    def saved_tokens(self, donor_id: DonorId) -> int:
        """Tokens that a donor has saved so far; 0 for one that is gone."""
        entry = self._entries.get(donor_id)
        return 0 if entry is None else entry.saved_tokens

    def inherit(self, donor_id: DonorId, other: DonorId) -> None:
        """Let a donor have what `other`, which it replaces, has saved, so that it is worth as much; `other` keeps it too."""
        self.record_hit(donor_id, self._entry(other).saved_tokens)

    def rebind(self, donor_id: DonorId, kv: object, *, is_far: bool = False) -> None:
        """Replace the handle of a donor whose K/V moved; the owner frees the old one. For `is_far` see `add`.

        Raises:
            CorruptCacheError: There is no such donor.
        """
        entry = self._entry(donor_id)
        entry.donor = replace(entry.donor, kv=kv)
        self._is_far[donor_id & _ROW_MASK] = is_far

    def reset(self) -> list[Donor]:
        """Forget all donors, pinned or not, and return them for the owner to free their K/V."""
        donors = list(self)
        for donor in donors:
            self._epochs[donor.donor_id & _ROW_MASK] += 1
        self._index.clear()
        self._passages.clear()
        self._arena.clear()
        self._queue.clear()
        self._entries.clear()
        self._tenants.clear()
        self._is_far[:] = False
        self._free_rows = list(range(self._num_rows - 1, -1, -1))
        self._num_tokens = self._pinned_tokens = 0
        for watcher in self._watchers:
            watcher.donors_reset()
        return donors

    def check(self) -> None:
        """Verify every invariant, of the parts too; for tests and idle time. Reads everything.

        Raises:
            CorruptCacheError: The first one that does not hold.
        """
        for part in (self._index, self._passages, self._arena, self._queue):
            part.check()
        rows = {donor_id & _ROW_MASK: entry.donor for donor_id, entry in self._entries.items()}
        if set(np.flatnonzero(self._arena.lengths).tolist()) != set(rows):
            raise CorruptCacheError("rows in use and donors are not the same")
        if set(rows) & set(self._free_rows) or len(rows) + len(self._free_rows) != self._num_rows:
            raise CorruptCacheError("rows are lost, or free and in use at once")
        for row, donor in rows.items():
            self._check_donor(row, donor)
        owned = sum(self._index.count(donor_id & _ROW_MASK, entry.keys) for donor_id, entry in self._entries.items())
        if owned != len(self._index):
            raise CorruptCacheError(f"the index has {len(self._index)} anchors, of which donors have {owned}")
        owned = sum(
            self._passages.count(row, donor.token_ids, self._tenants[donor.namespace.key].fingerprinter)
            for row, donor in rows.items()
        )
        if owned != len(self._passages):
            raise CorruptCacheError(f"the index has {len(self._passages)} passages, of which donors have {owned}")
        pinned = {donor_id for donor_id, entry in self._entries.items() if entry.num_pins}
        if set(self._queue) != set(self._entries) - pinned:
            raise CorruptCacheError("donors waiting for eviction are not those without a pin")
        sizes = (sum(donor.num_tokens for donor in self), sum(self._entries[i].donor.num_tokens for i in pinned))
        if sizes != (self._num_tokens, self._pinned_tokens) or self._num_tokens > self._capacity:
            raise CorruptCacheError(f"donors have {sizes} tokens (all, pinned), which is not what is counted")
        if sum(tenant.num_donors for tenant in self._tenants.values()) != len(rows):
            raise CorruptCacheError("donors by namespace do not sum up")

    def _check_donor(self, row: int, donor: Donor) -> None:
        if donor.donor_id != row | int(self._epochs[row]) << _ROW_BITS:
            raise CorruptCacheError(f"donor {donor.donor_id} is not the one in row {row}")
        if not np.array_equal(self._arena.get(row), donor.token_ids):
            raise CorruptCacheError(f"the tokens of donor {donor.donor_id} have changed")
        tenant = self._tenants.get(donor.namespace.key)
        if tenant is None or tenant.number != self._tenant_of_row[row] or donor.generation != self._generations[row]:
            raise CorruptCacheError(f"donor {donor.donor_id} is listed under another namespace or generation")

    def _admitted(self, hits: Hits, tenant: _Tenant, max_generation: int | None, with_far: bool) -> Hits:
        """Keep hits of the namespace, of low enough generation and near enough."""
        admitted = self._tenant_of_row[hits.rows] == tenant.number
        if not with_far:
            admitted &= ~self._is_far[hits.rows]
        if max_generation is not None:
            admitted &= self._generations[hits.rows] <= max_generation
        return hits if admitted.all() else hits.where(admitted)

    def _shared_with(
        self, proposed: Collection[DonorId], anchors: Anchors, tenant: _Tenant, max_generation: int | None
    ) -> list[Hits]:
        """Find where anchors of a prompt stand in each of `proposed` that may be used."""
        entries = (self._entries.get(donor_id) for donor_id in dict.fromkeys(proposed))
        rows = [(entry.donor.donor_id & _ROW_MASK, entry.donor) for entry in entries if entry is not None]
        return [
            shared_places(anchors, row, tenant.fingerprinter.anchors(donor.token_ids))
            for row, donor in rows
            if self._tenant_of_row[row] == tenant.number
            and (max_generation is None or donor.generation <= max_generation)
        ]

    def _stands_in(self, row: int, tokens: Tokens, offsets: Sequence[int]) -> bool:
        """Whether a donor's text is that of `tokens` from one of a few of `offsets` on."""
        own = self._arena.get(row)
        few = list(dict.fromkeys(offset for offset in offsets if 0 <= offset <= len(tokens) - len(own)))[:_MOST_OFFSETS]
        return any(np.array_equal(own, tokens[offset : offset + len(own)]) for offset in few)

    def _proved(self, runs: Runs, tokens: Tokens, fronts: Fronts) -> Runs:
        """Return the runs whose K/V are those of a full prefill of the prompt.

        Their donors attended to nothing approximate, encoded them at the prompt's positions, and behind the prompt's tokens:
        those of the donor are compared, of what stood in front of it the digest.
        """
        begins = self._start_positions[runs.rows]
        in_place = self._arena.starts[runs.rows] - runs.diagonals == begins
        candidates = np.flatnonzero(in_place & (self._generations[runs.rows] == 0))
        proved = []
        for index in candidates[np.argsort(begins[candidates], kind="stable")].tolist():
            donor, start, begin = self._donor_of(int(runs.rows[index])), int(runs.starts[index]), int(begins[index])
            same_front = donor.front == fronts.up_to(begin)
            if same_front and np.array_equal(donor.token_ids[: start - begin], tokens[begin:start]):
                proved.append(index)
        return runs.take(np.array(proved, np.int64))

    def _donor_of(self, row: int) -> Donor:
        return self._entry(DonorId(row | int(self._epochs[row]) << _ROW_BITS)).donor

    def _matches(self, pieces: Runs, *, is_exact: bool = False) -> list[Match]:
        ids = pieces.rows | self._epochs[pieces.rows] << _ROW_BITS
        donor_starts = pieces.starts + pieces.diagonals - self._arena.starts[pieces.rows]
        lengths = pieces.ends - pieces.starts
        columns = pieces.starts, ids, donor_starts, lengths, np.full(len(ids), is_exact), self._generations[pieces.rows]
        return list(map(Match, *(column.tolist() for column in columns)))

    def _entry(self, donor_id: DonorId) -> _Entry:
        try:
            return self._entries[donor_id]
        except KeyError:
            raise CorruptCacheError(f"there is no donor {donor_id}") from None

    def _take_row(self) -> int:
        if self._free_rows:
            return self._free_rows.pop()
        self._num_rows += 1
        return self._num_rows - 1

    def _tenant(self, namespace: Namespace | KeyedNamespace) -> _Tenant:
        if namespace.key not in self._tenants:
            self._num_tenants += 1
            self._tenants[namespace.key] = _Tenant(self._num_tenants, Fingerprinter(namespace.key, self._secret))
        return self._tenants[namespace.key]

    def _leave_tenant(self, namespace: Namespace | KeyedNamespace) -> None:
        tenant = self._tenants[namespace.key]
        tenant.num_donors -= 1
        if not tenant.num_donors:
            del self._tenants[namespace.key]


def _as_tokens(token_ids: ArrayLike) -> Tokens:
    """Return int32 tokens; refuse what would change value, for a wrapped id would match another token."""
    given = np.asarray(token_ids)
    if given.ndim != 1 or (given.dtype.kind not in "iu" and given.size):
        raise ConfigError("token ids must be a one-dimensional sequence of integers")
    tokens: Tokens = given.astype(np.int32, copy=False)
    if tokens is not given and (tokens != given).any():
        raise ConfigError("token ids must fit into 32 bits")
    return tokens
