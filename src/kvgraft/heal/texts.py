"""Texts of generation > 0 that an engine holds, learned from its KV events, and their order of healing."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvgraft.donors import DonorCatalogue, DonorQuery
from kvgraft.donors.front import Fronts
from kvgraft.errors import CapacityError
from kvgraft.events import AllBlocksCleared, BlockStored
from kvgraft.reuse.donor_events import donor_generation, donor_place, donor_scope, is_donor, scope_of, tokens_before
from kvgraft.reuse.sent_fronts import ReceivedFronts
from kvgraft.types import Fidelity

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvgraft.events import KVEvent
    from kvgraft.reuse.donor_events import DonorPlace, DonorScope
    from kvgraft.reuse.sent_fronts import Beginning
    from kvgraft.types import DonorId, KeyedNamespace

logger = logging.getLogger(__name__)

_MAX_COUNTED = 65_536
"""Texts with a count of announcements, held or not; the oldest are forgotten."""
_NOWHERE = 1 << 40
"""Place of a donor whose sender does not say where it stands: no prompt is so long."""


def _no_tokens() -> NDArray[np.int32]:
    return np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """A donor of generation > 0.

    Attributes:
        name: The engine's name of the donor.
        namespace: Whose it is.
        token_ids: `(n,)`.
        generation: 1 or more.
        seen: How often the text was announced so far.
        seen_at: When it was announced last, in seconds of the clock.
        beginning: All that stood before it, where that is known.
        prompt: The tokens that make it exact, `(m,)`: of a session all from its beginning on, else the text alone. Of what
            `Texts.hottest` returns.
    """

    name: int | bytes
    namespace: KeyedNamespace
    token_ids: NDArray[np.int32]
    generation: int
    seen: int
    seen_at: float
    beginning: Beginning | None = None
    prompt: NDArray[np.int32] = field(default_factory=_no_tokens)

    @property
    def is_in_place(self) -> bool:
        """Whether the prompt begins where the text's session does."""
        return len(self.prompt) > len(self.token_ids)

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

    A session's texts, before which all is known, are computed in their places: what its next turn begins with is then an
    exact prefix. The last text of a session has the others before it, and so stands for all of them.

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
        self._fronts = ReceivedFronts(max_tokens)
        self._ends: dict[bytes, set[int | bytes]] = {}  # names of open texts by the digest of all up to their ends
        self._end_at: dict[int | bytes, tuple[int, bytes]] = {}
        self._passed: set[int | bytes] = set()  # their sessions have gone on
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

        Sessions come first, the latest of them before the others: its next turn is to be expected first. Of texts without a
        known beginning it is the hottest.

        Args:
            is_resting: Texts that are not named now; they stay open.

        Complexity: O(k log k) for k open texts, and O(n log n) of the tokens of each that is passed over.
        """
        with self._lock:
            for text in sorted(self._open.values(), key=self._rank, reverse=True):
                if is_resting(text):
                    continue
                front = None if text.beginning is None else self._fronts.text(text.beginning)
                if not self._is_exact(text, front):
                    parts = [text.token_ids] if front is None else [front, text.token_ids]
                    return replace(text, prompt=np.concatenate(parts))
                self._covered[text.name] = self._open.pop(text.name)
            return None

    def done(self, text: Text) -> None:
        """Do not name a text again: it cannot be computed, or was."""
        with self._lock:
            self._open.pop(text.name, None)

    def healed(self, text: Text) -> None:
        """Name neither a text again, which was computed, nor those that its prompt has in their places.

        Its engine is about to say so; until then they would be asked for in vain.
        """
        self.done(text)
        with self._lock:
            fronts = Fronts(text.namespace.key, text.prompt)
            for name in self._ending_in(fronts, len(text.prompt)):
                self._open.pop(name, None)

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
            assert self._passed <= self._end_at.keys() <= self._ids.keys()
            assert {name for names in self._ends.values() for name in names} == self._end_at.keys()

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
        tokens, place = np.asarray(event.token_ids, np.int32), donor_place(event)
        start, front = (_NOWHERE, b"") if place is None else (place.start, place.front)
        try:
            donor, evicted = self._held.add(
                owner.namespace, tokens, name, generation=generation, start_position=start, front=front
            )
        except CapacityError:
            return
        for gone in evicted:
            self._drop(gone.kv)  # type: ignore[arg-type]
        if donor is None:
            return
        self._ids[name] = donor.donor_id
        if generation:
            seen = self._count(owner, donor.token_ids)
            text = Text(name, owner.namespace, donor.token_ids, generation, seen, self._clock())
            self._open[name] = replace(text, beginning=self._beginning(event, text, place))

    def _removed(self, name: int | bytes) -> None:
        self._private.discard(name)
        donor_id = self._ids.get(name)
        if donor_id is not None:
            self._held.remove(donor_id)
            self._drop(name)

    def _drop(self, name: int | bytes) -> None:
        del self._ids[name]
        self._passed.discard(name)
        _, end = self._end_at.pop(name, (0, b""))
        if end:
            self._ends[end].discard(name)
            if not self._ends[end]:
                del self._ends[end]
        if self._open.pop(name, None) is None and self._covered.pop(name, None) is None:
            self._open |= self._covered  # it may have been exact, and the only one to have their text
            self._covered.clear()

    def _beginning(self, event: BlockStored, text: Text, place: DonorPlace | None) -> Beginning | None:
        """Learn what stood before a text, and which open texts' sessions have gone on to it; None where that is not known."""
        before = tokens_before(event)
        if place is None or before is None:
            return None
        beginning = self._fronts.receive(text.namespace.key, place, before, text.token_ids)
        front = None if beginning is None else self._fronts.text(beginning)
        if front is None:
            return None
        whole = np.concatenate([front, text.token_ids])
        fronts = Fronts(text.namespace.key, whole)
        self._passed.update(self._ending_in(fronts, place.start))
        end = fronts.up_to(len(whole))
        self._end_at[text.name] = len(whole), end
        self._ends.setdefault(end, set()).add(text.name)
        return beginning

    def _ending_in(self, fronts: Fronts, most: int) -> list[int | bytes]:
        """Return the names of texts in their places that end in the first `most` tokens of a text, with it. O(texts)."""
        stops = sorted({stop for stop, _ in self._end_at.values() if stop <= most})
        return [name for stop in stops for name in self._ends.get(fronts.up_to(stop), ())]

    def _rank(self, text: Text) -> tuple[int, float, float]:
        """Return the sort key of what is named first: the ends of sessions, then what comes before these, then the others."""
        if text.beginning is None:
            return (0, *text.heat)
        return 1 if text.name in self._passed else 2, text.seen_at, 0

    def _count(self, owner: DonorScope, tokens: NDArray[np.int32]) -> int:
        digest = hashlib.blake2b(tokens.tobytes(), digest_size=16, key=owner.namespace.key).digest()
        seen = self._seen[digest] = self._seen.pop(digest, 0) + 1
        if len(self._seen) > _MAX_COUNTED:
            del self._seen[next(iter(self._seen))]
        return seen

    def _is_exact(self, text: Text, front: NDArray[np.int32] | None) -> bool:
        """Return whether donors of generation 0 have the text, in its place if what stood before it is known.

        The engine would not register it again.
        """
        start = 0 if front is None else len(front)
        prompt = text.token_ids if front is None else np.concatenate([front, text.token_ids])
        matches = self._held.find(DonorQuery(text.namespace, prompt, start=start, max_generation=0))
        exact = [match for match in matches if front is None or match.fidelity is Fidelity.EXACT]
        return len(text.token_ids) - sum(match.length for match in exact) < _LEAST_NEW_TOKENS

    def _forget(self) -> None:
        self._held.reset()
        self._ids.clear()
        self._open.clear()
        self._covered.clear()
        self._private.clear()
        self._ends.clear()
        self._end_at.clear()
        self._passed.clear()


_LEAST_NEW_TOKENS = 16
"""The shortest text that becomes a donor anywhere."""
