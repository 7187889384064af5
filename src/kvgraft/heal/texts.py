"""Texts of generation > 0 that an engine holds, learned from its KV events, and their order of healing."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvgraft.donors import DonorCatalogue
from kvgraft.errors import CapacityError
from kvgraft.prefix import AllBlocksCleared, BlockStored
from kvgraft.reuse.donor_events import donor_generation, donor_scope, is_donor, scope_of
from kvgraft.types import KeyedNamespace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvgraft.prefix import KVEvent
    from kvgraft.types import DonorId

logger = logging.getLogger(__name__)

_MAX_COUNTED = 65_536
"""Texts with a count of announcements, held or not; the oldest are forgotten."""


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """A donor of generation > 0.

    Attributes:
        name: The engine's name of the donor.
        namespace: Digest of the namespace, as the engine names it.
        token_ids: `(n,)`.
        generation: 1 or more.
        seen: How often the text was announced so far.
        seen_at: When it was announced last, in seconds of the clock.
    """

    name: int | bytes
    namespace: str
    token_ids: NDArray[np.int32]
    generation: int
    seen: int
    seen_at: float

    @property
    def heat(self) -> tuple[int, float]:
        """Sort key of the hottest: announced often and of high generation, and of equal ones the latest."""
        return self.seen * self.generation, self.seen_at


class TextCounts(NamedTuple):
    """Numbers of texts and pages of an engine.

    Attributes:
        open: Texts that could be computed again.
        private: Held texts of generation > 0 that cannot: they belong to an adapter or a salt, which events do not name.
        donors: Donors that were announced so far.
        pages: Pages of prefixes that were announced so far.
    """

    open: int
    private: int
    donors: int
    pages: int


class Texts:
    """The announced donors of one engine. Thread-safe: one thread hears events, another asks.

    Of an engine nothing is believed across a gap in its events; what is forgotten then is learned anew.
    """

    def __init__(self, *, max_tokens: int = 1 << 20, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin without texts.

        Args:
            max_tokens: Text that is remembered, about 50 bytes each; the least valuable are forgotten.
            clock: Seconds.
        """
        self._lock = threading.Lock()
        self._clock = clock
        self._held = DonorCatalogue(max_tokens)
        self._ids: dict[int | bytes, DonorId] = {}
        self._open: dict[int | bytes, Text] = {}
        self._covered: dict[int | bytes, Text] = {}  # donors of generation 0 have them, too, for now
        self._private: set[int | bytes] = set()
        self._seen: dict[bytes, int] = {}
        self._num_donors = self._num_pages = 0
        self.heard_at = clock()

    def apply(self, worker: str, events: Sequence[KVEvent], *, forget: bool = False) -> None:
        """Take over what the engine says; with `forget`, instead of all that was known. A failure forgets it all, too."""
        with self._lock:
            self.heard_at = self._clock()
            if forget:
                self._forget()
            try:
                for event in events:
                    self._apply(event)
            except Exception:
                logger.exception("events of %s cannot be applied; what is known of it is forgotten", worker)
                self._forget()

    def hottest(self, is_resting: Callable[[Text], bool] = lambda _: False) -> Text | None:
        """Name the text to compute next; None if there is none. One that donors of generation 0 have anyhow is passed over.

        Args:
            is_resting: Texts that are not named now; they stay open.

        Complexity: O(k log k) for k open texts, and O(n log n) of the tokens of each that is passed over.
        """
        with self._lock:
            for text in sorted(self._open.values(), key=lambda text: text.heat, reverse=True):
                if is_resting(text):
                    continue
                if not self._is_exact(text):
                    return text
                self._covered[text.name] = self._open.pop(text.name)
            return None

    def done(self, text: Text) -> None:
        """Do not name a text again: it was computed, or cannot be."""
        with self._lock:
            self._open.pop(text.name, None)

    def counts(self) -> TextCounts:
        """Say what is known."""
        with self._lock:
            return TextCounts(len(self._open), len(self._private), self._num_donors, self._num_pages)

    def check(self) -> None:
        """Verify the invariants; for tests.

        Raises:
            CorruptCacheError: One does not hold.
        """
        with self._lock:
            self._held.check()
            assert self._open.keys() | self._covered.keys() <= self._ids.keys()
            assert not self._open.keys() & self._covered.keys()
            assert {donor.donor_id for donor in self._held} == set(self._ids.values())

    def _apply(self, event: KVEvent) -> None:
        if isinstance(event, AllBlocksCleared):
            self._forget()
        elif isinstance(event, BlockStored):
            if is_donor(event):
                self._stored(event)
            else:
                self._num_pages += len(event.block_hashes)
        else:
            for name in event.block_hashes:
                self._removed(name)

    def _stored(self, event: BlockStored) -> None:
        owner, name = donor_scope(event), event.block_hashes[0] if len(event.block_hashes) == 1 else None
        if owner is None or name is None or name in self._ids or name in self._private:
            return
        self._num_donors += 1
        generation = donor_generation(event)
        if owner.scope != scope_of():
            if generation:
                self._private.add(name)
            return
        tokens = np.asarray(event.token_ids, np.int32)
        try:
            donor, evicted = self._held.add(_key(owner.namespace_key), tokens, name, generation=generation)
        except CapacityError:
            return
        for gone in evicted:
            self._drop(gone.kv)  # type: ignore[arg-type]
        if donor is None:
            return
        self._ids[name] = donor.donor_id
        if generation:
            seen = self._count(owner.namespace_key, donor.token_ids)
            self._open[name] = Text(name, owner.namespace_key, donor.token_ids, generation, seen, self._clock())

    def _removed(self, name: int | bytes) -> None:
        self._private.discard(name)
        donor_id = self._ids.get(name)
        if donor_id is not None:
            self._held.remove(donor_id)
            self._drop(name)

    def _drop(self, name: int | bytes) -> None:
        del self._ids[name]
        if self._open.pop(name, None) is None and self._covered.pop(name, None) is None:
            self._open |= self._covered  # it may have been exact, and the only one to have their text
            self._covered.clear()

    def _count(self, namespace: str, tokens: NDArray[np.int32]) -> int:
        digest = hashlib.blake2b(tokens.tobytes(), digest_size=16, key=namespace.encode()[:64]).digest()
        seen = self._seen[digest] = self._seen.pop(digest, 0) + 1
        if len(self._seen) > _MAX_COUNTED:
            del self._seen[next(iter(self._seen))]
        return seen

    def _is_exact(self, text: Text) -> bool:
        """Return whether donors of generation 0 have the text: the engine would not register it again."""
        matches = self._held.find(_key(text.namespace), text.token_ids, max_generation=0)
        return len(text.token_ids) - sum(match.length for match in matches) < _LEAST_NEW_TOKENS

    def _forget(self) -> None:
        self._held.reset()
        self._ids.clear()
        self._open.clear()
        self._covered.clear()
        self._private.clear()


_LEAST_NEW_TOKENS = 16
"""The shortest text that becomes a donor anywhere."""


def _key(namespace: str) -> KeyedNamespace:
    return KeyedNamespace(hashlib.blake2b(namespace.encode(), digest_size=16, person=b"kvgraft.heal").digest())
