"""Registry of donors: their texts and identities, pins, worth, and which leaves when room is short. Holds no K/V."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvgraft.config import check_host_memory
from kvgraft.donors.donor import Donor
from kvgraft.donors.eviction import DonorQueue
from kvgraft.donors.finder import MatchFinder, id_in_row, row_of
from kvgraft.donors.fingerprint import GRAM_TOKENS
from kvgraft.donors.front import FRONT_BYTES
from kvgraft.donors.query import DonorQuery, as_tokens
from kvgraft.donors.secret import SECRET_BYTES, process_secret
from kvgraft.errors import CapacityError, ConfigError, CorruptCacheError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    from kvgraft.types import DonorId, KeyedNamespace, Match, Namespace

BYTES_PER_TOKEN = 48
"""Host memory of a catalogue per token of its capacity, at most; most of it is reserved at once and committed as it fills."""


class DonorWatcher(Protocol):
    """Observer of the donors of a catalogue; must not change it and must not raise."""

    def donor_added(self, donor: Donor, before: NDArray[np.integer] | None) -> None:
        """A text has become a donor; `before` is what stood before it, not to be kept, and None where that is not known."""

    def donor_removed(self, donor: Donor) -> None:
        """A donor is gone."""

    def donors_reset(self) -> None:
        """All donors are gone."""


class AddResult(NamedTuple):
    """The result of adding a text."""

    donor: Donor | None
    """None if the text is shorter than a k-gram and could never be found."""
    evicted: tuple[Donor, ...]
    """Donors that had to leave; the owner frees their K/V."""


@dataclass(slots=True)
class _Registered:
    """A donor with its pins and what it has saved."""

    donor: Donor
    num_pins: int = 0
    saved_tokens: int = 0

    @property
    def value(self) -> float:
        """Tokens saved per token held, the registration counted as one use."""
        return 1 + self.saved_tokens / self.donor.num_tokens


class DonorCatalogue:
    """Finds, for a prompt, donors with the same tokens at any offset.

    The catalogue decides and its owner frees: donors leave through results, and `kv` is never looked at. Sizes are in
    tokens. Not thread-safe. What changes a donor that is gone raises `CorruptCacheError`.

    Invariants (verified by `check`):
        - `num_tokens` is the sum of the donors' lengths and at most `capacity_tokens`.
        - Every donor has a row with its tokens in the arena, and every row in use has a donor.
        - Every entry of the index is an anchor of a donor.
        - A donor waits for eviction if and only if it is not pinned.

    Attributes:
        finder: The search, with its indexes.

    Complexity: `find` is O(n log n) in the length of the prompt, independent of what is registered; `add` and `remove`
    are O(n) in the donor's length plus O(log donors).
    """

    def __init__(self, capacity_tokens: int, *, min_run: int = GRAM_TOKENS, secret: bytes | None = None) -> None:
        """Build an empty catalogue.

        Args:
            capacity_tokens: Tokens that all donors may have together; about 30 bytes of host memory each, and
                up to 24 more as far as many have the same text.
            min_run: Shortest match that `find` gives.
            secret: Keys all hashes, together with the namespace. Which of equally good donors `find` names, and which
                runs shorter than 32 tokens it finds, depends on it: catalogues that must behave alike in several
                processes need the same one (`new_secret`), handed over in secret. By default one that all
                catalogues of this process share.

        Raises:
            ConfigError: An argument is below a k-gram of 16 tokens, the secret does not have 32 bytes, or the catalogue would
                take more memory than there is.
        """
        secret = process_secret() if secret is None else secret
        if len(secret) != SECRET_BYTES:
            raise ConfigError(f"secret must have {SECRET_BYTES} bytes, not {len(secret)}; new_secret() makes one")
        for name, value in (("capacity_tokens", capacity_tokens), ("min_run", min_run)):
            if value < GRAM_TOKENS:
                raise ConfigError(f"{name} must be at least {GRAM_TOKENS}, not {value}")
        check_host_memory("donor_tokens", capacity_tokens, BYTES_PER_TOKEN)
        self.finder = MatchFinder(capacity_tokens, min_run=min_run, secret=secret)
        self._capacity = capacity_tokens
        self._queue = DonorQueue()
        self._entries: dict[DonorId, _Registered] = {}
        self._first_epoch = 0
        self._epochs: list[int] = []
        self._free_rows: list[int] = []
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
    def num_pins(self) -> int:
        """Pins of all donors. Complexity: O(donors)."""
        return sum(entry.num_pins for entry in self._entries.values())

    @property
    def num_stored(self) -> int:
        """Donors with K/V in stores alone."""
        return self.finder.num_stored

    @property
    def next_epoch(self) -> int:
        """Above the epochs of all ids that were given so far (`id_in_row`). Complexity: O(rows)."""
        return max(self._epochs, default=self._first_epoch) + 1

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Donor]:
        """Yield all donors in order of registration."""
        return (entry.donor for entry in self._entries.values())

    def watch(self, watcher: DonorWatcher) -> None:
        """Report donors that come and go from now on to `watcher`."""
        self._watchers.append(watcher)

    def find(self, query: DonorQuery) -> list[Match]:
        """Find the tokens of a prompt that donors have, at any offset. Changes nothing.

        Every run of at least 32 tokens that the prompt shares with a donor is found, unless newer text displaced
        its anchors; of shorter ones, down to `min_run`, some are. A donor that was computed exactly, after the same tokens
        as in the prompt, is taken before any other, as far as it reaches: it costs no fidelity.

        Returns:
            Sorted, disjoint matches of at least `min_run` tokens, few and long ones preferred.

        Raises:
            ConfigError: The tokens are not a one-dimensional sequence of 32-bit integers.
        """
        return self.finder.find(query)

    def inside(
        self, namespace: Namespace | KeyedNamespace, token_ids: ArrayLike, *, min_generation: int
    ) -> list[Donor]:
        """Find donors of at least `min_generation` that stand in `token_ids` in full, at any offset. Changes nothing.

        Of donors with the same anchors those are found that the index lists, the newest.

        Complexity: O(n), and the tokens of what is proposed.
        """
        ids = self.finder.inside(namespace.key, as_tokens(token_ids), min_generation=min_generation)
        return [self._entries[donor_id].donor for donor_id in ids]

    def add(  # noqa: PLR0913 - what there is to say of a donor
        self,
        namespace: Namespace | KeyedNamespace,
        token_ids: ArrayLike,
        kv: object,
        *,
        generation: int = 0,
        start_position: int = 0,
        front: bytes = b"",
        before: NDArray[np.integer] | None = None,
        is_stored: bool = False,
    ) -> AddResult:
        """Register a text, making room by evicting what is worth least.

        Args:
            namespace: Who may reuse it.
            token_ids: The text; copied.
            kv: Handle of its K/V; goes on belonging to the caller.
            generation: See `Donor`.
            start_position: See `Donor`.
            front: See `Donor`.
            before: All tokens before it, for those who watch, where the caller has them; not kept.
            is_stored: Whether its K/V lie where reading them takes time; others with the same text are preferred.

        Raises:
            CapacityError: The text is longer than the catalogue, or pinned donors leave too little room. Nothing has
                changed then.
            ConfigError: `token_ids` are not a one-dimensional sequence of 32-bit integers, or `front` is no digest.
        """
        if len(front) not in (0, FRONT_BYTES):
            raise ConfigError(
                f"front must have {FRONT_BYTES} bytes or none, not {len(front)}; front_digest() makes one"
            )
        tokens = as_tokens(token_ids).copy()
        tokens.flags.writeable = False
        if len(tokens) < GRAM_TOKENS:
            return AddResult(None, ())
        if len(tokens) > self._capacity - self._pinned_tokens:
            raise CapacityError(
                f"a donor of {len(tokens)} tokens does not fit: the catalogue holds {self._capacity}, "
                f"of which {self._pinned_tokens} are pinned; raise its capacity"
            )
        anchors = self.finder.anchors(namespace.key, tokens)  # before anything changes: there may be no memory
        evicted = self.evict(self._num_tokens + len(tokens) - self._capacity)
        donor = Donor(self._free_id(), namespace, tokens, kv, generation, start_position, front)
        entry = _Registered(donor)
        self.finder.insert(donor, anchors, is_stored=is_stored)
        try:
            self._queue.put(donor.donor_id, entry.value)
        except BaseException:
            self.finder.remove(donor.donor_id)
            raise
        self._free_rows.pop()
        self._entries[donor.donor_id] = entry
        self._num_tokens += len(tokens)
        try:
            for watcher in self._watchers:
                watcher.donor_added(donor, before)
            return AddResult(donor, tuple(evicted))
        except BaseException:
            self.remove(donor.donor_id)  # its owner does not hear of it
            raise

    def get(self, donor_id: DonorId) -> Donor | None:
        """Return a donor, or None if it is gone."""
        entry = self._entries.get(donor_id)
        return None if entry is None else entry.donor

    def remove(self, donor_id: DonorId) -> Donor:
        """Forget a donor, pinned or not, and return it for the owner to free its K/V. Complexity: O(own anchors)."""
        entry, row = self._entry(donor_id), row_of(donor_id)
        num_tokens = entry.donor.num_tokens
        self._queue.discard(donor_id)
        try:
            self.finder.remove(donor_id)
        except BaseException:
            if not entry.num_pins:
                self._queue.put(donor_id, entry.value)
            raise
        del self._entries[donor_id]
        self._epochs[row] += 1
        self._free_rows.append(row)
        self._num_tokens -= num_tokens
        self._pinned_tokens -= num_tokens if entry.num_pins else 0
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
        """Keep a donor from eviction until as many `unpin` follow."""
        entry = self._entry(donor_id)
        if not entry.num_pins:
            num_tokens = entry.donor.num_tokens
            self._queue.discard(donor_id)
            self._pinned_tokens += num_tokens
        entry.num_pins += 1

    def unpin(self, donor_id: DonorId) -> None:
        """Give one pin back; raises `CorruptCacheError` if the donor is not pinned."""
        entry = self._entry(donor_id)
        if not entry.num_pins:
            raise CorruptCacheError(f"donor {donor_id} is not pinned")
        if entry.num_pins == 1:
            num_tokens = entry.donor.num_tokens
            self._queue.put(donor_id, entry.value)
            self._pinned_tokens -= num_tokens
        entry.num_pins -= 1

    def is_pinned(self, donor_id: DonorId) -> bool:
        """Return whether a donor is registered and pinned."""
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

    def rebind(self, donor_id: DonorId, kv: object, *, is_stored: bool = False) -> None:
        """Replace the handle of K/V that moved; the owner frees the old one. For `is_stored` see `add`."""
        entry = self._entry(donor_id)
        donor = replace(entry.donor, kv=kv)
        self.finder.set_stored(donor_id, is_stored)
        entry.donor = donor

    def reset(self, first_epoch: int = 0) -> list[Donor]:
        """Forget all donors, pinned or not, and return them for the owner to free their K/V.

        Catalogues that are all given the highest `next_epoch` of any of them give the same donors the same ids from then on.
        """
        donors = list(self)
        self._first_epoch = max(first_epoch, self.next_epoch)
        self.finder.clear()
        self._queue.clear()
        for known in (self._entries, self._epochs, self._free_rows):
            known.clear()
        self._num_tokens = self._pinned_tokens = 0
        for watcher in self._watchers:
            watcher.donors_reset()
        return donors

    def check(self) -> None:
        """Verify every invariant, of the parts too; for tests and idle time. Reads everything. Raises `CorruptCacheError`."""
        self._queue.check()
        self.finder.check({donor_id: entry.donor for donor_id, entry in self._entries.items()})
        rows = set(map(row_of, self._entries))
        if rows & set(self._free_rows) or len(rows) + len(self._free_rows) != len(self._epochs):
            raise CorruptCacheError("rows are lost, or free and in use at once")
        pinned = {donor_id for donor_id, entry in self._entries.items() if entry.num_pins}
        if set(self._queue) != set(self._entries) - pinned:
            raise CorruptCacheError("donors waiting for eviction are not those without a pin")
        sizes = (sum(donor.num_tokens for donor in self), sum(self._entries[i].donor.num_tokens for i in pinned))
        if sizes != (self._num_tokens, self._pinned_tokens) or self._num_tokens > self._capacity:
            raise CorruptCacheError(f"donors have {sizes} tokens (all, pinned), which is not what is counted")

    def _entry(self, donor_id: DonorId) -> _Registered:
        try:
            return self._entries[donor_id]
        except KeyError:
            raise CorruptCacheError(f"there is no donor {donor_id}") from None

    def _free_id(self) -> DonorId:
        """Return an id that no donor had before, in the last of the rows that no donor has now."""
        if not self._free_rows:
            self._free_rows.append(len(self._epochs))
            self._epochs.append(self._first_epoch)
        row = self._free_rows[-1]
        return id_in_row(row, self._epochs[row])
