"""Parts of the engine's own donors that stores hold, so that a conversation is not written again with every turn."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvgraft.types import DonorId, Match


class StoredPart(NamedTuple):
    """Tokens `[start, stop)` of a donor that the object `key` has; `is_whole` if it has no others."""

    start: int
    stop: int
    key: str
    is_whole: bool


class StoredCover:
    """Parts by donor and donors by object; also of what is still on its way to a store. Not thread-safe."""

    def __init__(self) -> None:
        self._parts: dict[DonorId, tuple[StoredPart, ...]] = {}
        self._holders: defaultdict[str, set[DonorId]] = defaultdict(set)

    def of(self, donor_id: DonorId) -> tuple[StoredPart, ...]:
        """Return the parts of a donor, in no order; they may overlap."""
        return self._parts.get(donor_id, ())

    def inherited(self, match: Match) -> Iterator[StoredPart]:
        """Yield the parts of a text that a stored or partly stored donor of equal text gives it.

        Args:
            match: Of the text with the donor.
        """
        shift = match.position_delta
        for part in self.of(match.donor_id):
            start, stop = max(part.start, match.donor_start), min(part.stop, match.donor_start + match.length)
            if start < stop:
                is_whole = part.is_whole and (start, stop) == (part.start, part.stop)
                yield StoredPart(start + shift, stop + shift, part.key, is_whole)

    def add(self, donor_id: DonorId, parts: Iterable[StoredPart]) -> None:
        """Note that a donor has these parts, besides others."""
        self._parts[donor_id] = tuple(dict.fromkeys((*self.of(donor_id), *parts)))
        for part in self.of(donor_id):
            self._holders[part.key].add(donor_id)

    def contains(self, key: str) -> bool:
        """Whether a donor has all of an object's tokens, so that the object adds none."""
        return next(self.whole(key), None) is not None

    def whole(self, key: str) -> Iterator[tuple[DonorId, StoredPart]]:
        """Yield the donors that have all of an object's tokens, and where."""
        for donor_id in self._holders.get(key, ()):
            yield from ((donor_id, part) for part in self.of(donor_id) if part.key == key and part.is_whole)

    def missing(self, donor_id: DonorId, num_tokens: int, least: int) -> Iterator[tuple[int, int]]:
        """Yield the runs of at least `least` tokens of a donor that no stored object has."""
        start = 0
        for part in (*sorted(self.of(donor_id)), StoredPart(num_tokens, num_tokens, "", is_whole=False)):
            if part.start - start >= least:
                yield start, part.start
            start = max(start, part.stop)

    def lost(self, key: str) -> None:
        """Note that stores do not have an object any more, or never came to have it."""
        for donor_id in self._holders.pop(key, ()):
            self._parts[donor_id] = tuple(part for part in self.of(donor_id) if part.key != key)

    def forget(self, donor_id: DonorId) -> list[StoredPart]:
        """Forget a donor; returns its parts that are whole objects."""
        parts = self._parts.pop(donor_id, ())
        for part in parts:
            self._holders[part.key].discard(donor_id)
            if not self._holders[part.key]:
                del self._holders[part.key]
        return [part for part in parts if part.is_whole]

    def clear(self) -> None:
        """Forget everything."""
        self._parts.clear()
        self._holders.clear()
