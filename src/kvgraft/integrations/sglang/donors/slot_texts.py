"""Texts by slot of the device: SGLang names only the slots of what it evicts."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvgraft.errors import CorruptCacheError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from kvgraft.integrations.sglang.donors.texts import TreeText

_NO_TEXT = -1


class TextPart(NamedTuple):
    """Consecutive tokens of a text: `text.tokens[start : start + length]` lie in `slots[first : first + length]`.

    `slots` are those that `SlotTexts.in_slots` was asked about.
    """

    text: TreeText
    start: int
    length: int
    first: int


class SlotTexts:
    """Remembers for every slot of the pool the text and the index in it. The last claim of a slot counts.

    Complexity: every method is O(slots named).
    """

    def __init__(self, num_slots: int) -> None:
        self._owners = np.full(num_slots, _NO_TEXT, np.int32)
        self._indices = np.zeros(num_slots, np.int32)
        self._texts: dict[int, TreeText] = {}
        self._held: dict[int, int] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._texts)

    def claim(self, text: TreeText, start: int, slots: NDArray[np.int64]) -> None:
        """Note that `text.tokens[start : start + len(slots)]` lie in `slots`."""
        if not len(slots):
            return
        indices = np.arange(start, start + len(slots))
        self.forget(slots)
        number = self._next
        self._next += 1
        self._texts[number], self._held[number] = text, len(slots)
        self._owners[slots], self._indices[slots] = number, indices

    def forget(self, slots: NDArray[np.int64]) -> None:
        """Note that `slots` hold nothing any more."""
        owners, counts = np.unique(self._owners[slots], return_counts=True)
        for number, count in zip(owners.tolist(), counts.tolist(), strict=True):
            if number == _NO_TEXT:
                continue
            self._held[number] -= count
            if not self._held[number]:
                del self._texts[number], self._held[number]
        self._owners[slots] = _NO_TEXT

    def in_slots(self, slots: NDArray[np.int64]) -> Iterator[TextPart]:
        """Yield the texts that lie in `slots`, cut where text or order breaks off."""
        owners, indices = self._owners[slots], self._indices[slots]
        breaks = np.flatnonzero((np.diff(owners) != 0) | (np.diff(indices) != 1)) + 1
        for first, last in zip([0, *breaks.tolist()], [*breaks.tolist(), len(slots)], strict=True):
            number = int(owners[first]) if last > first else _NO_TEXT
            if number != _NO_TEXT:
                yield TextPart(self._texts[number], int(indices[first]), last - first, first)

    def check(self) -> None:
        """Verify that every text has the slots that it is said to have; raises `CorruptCacheError`. O(slots)."""
        owners, counts = np.unique(self._owners[self._owners != _NO_TEXT], return_counts=True)
        if (
            dict(zip(owners.tolist(), counts.tolist(), strict=True)) != self._held
            or self._held.keys() != self._texts.keys()
        ):
            raise CorruptCacheError("texts and the slots in which they lie are not the same")

    def clear(self) -> None:
        """Forget everything."""
        self._owners[:] = _NO_TEXT
        self._texts.clear()
        self._held.clear()
