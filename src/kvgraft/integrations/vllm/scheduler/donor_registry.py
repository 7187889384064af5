"""Donors, texts that are being captured to become donors, and the memory of both: what workers are told to keep."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from kvgraft.donors import DonorCatalogue
from kvgraft.errors import CorruptCacheError, KVGraftError
from kvgraft.integrations.vllm.messages import Seal
from kvgraft.reuse.registration import Registration

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvgraft.integrations.vllm.messages import TextId
    from kvgraft.types import DonorId, Namespace


@dataclass(slots=True, eq=False)
class CapturedText:
    """Text that is being captured and shall become a donor.

    Attributes:
        text_id: Its name.
        start: Position of its first token.
        stop: First position behind it.
        generation: Of the donor.
        next: First position that is not captured yet.
    """

    text_id: TextId
    start: int
    stop: int
    generation: int
    next: int

    @property
    def is_complete(self) -> bool:
        """Whether all of it is captured."""
        return self.next >= self.stop


class DonorRegistry:
    """Decides what workers keep in host memory. Their budgets hold because every token is counted before it is captured.

    Invariant: tokens of donors and of texts are together at most `catalogue.capacity_tokens`.
    """

    def __init__(self, capacity_tokens: int, *, min_run: int, max_generation: int) -> None:
        self.catalogue = DonorCatalogue(capacity_tokens, min_run=min_run)
        self.rules = Registration(self.catalogue, min_run=min_run, max_generation=max_generation)
        self.num_refused_texts = 0
        self._min_run = min_run
        self._text_ids = count()
        self._reserved: dict[TextId, int] = {}
        self._reserved_tokens = 0
        self._drops: list[DonorId] = []
        self._discards: list[TextId] = []
        self._seals: list[Seal] = []

    @property
    def reserved_tokens(self) -> int:
        """Tokens of texts."""
        return self._reserved_tokens

    def open(self, start: int, stop: int, generation: int) -> CapturedText | None:
        """Make room for the text of positions `[start, stop)`; None if it is too short, too derived or does not fit."""
        if not self.rules.admits(stop - start, generation):
            return None
        text = self._opened(start, generation)
        if self.extend(text, stop):
            return text
        del self._reserved[text.text_id]
        self.num_refused_texts += 1
        return None

    def open_output(self, start: int, generation: int) -> CapturedText | None:
        """Begin text whose length is not known; `extend` makes room as it grows."""
        return self._opened(start, generation) if self.rules.admits(self._min_run, generation) else None

    def extend(self, text: CapturedText, stop: int) -> bool:
        """Make room for the text to reach `stop`, dropping donors of least value; False if that does not do."""
        wanted = stop - text.start - self._reserved[text.text_id]
        catalogue = self.catalogue
        short = catalogue.num_tokens + self._reserved_tokens + wanted - catalogue.capacity_tokens
        if short > 0:
            self._drops += [donor.donor_id for donor in catalogue.evict(short)]
        if catalogue.num_tokens + self._reserved_tokens + wanted > catalogue.capacity_tokens:
            return False
        text.stop = stop
        self._reserved[text.text_id] += wanted
        self._reserved_tokens += wanted
        return True

    def register(self, namespace: Namespace, token_ids: NDArray[np.int32], text: CapturedText) -> DonorId | None:
        """Turn a complete text into a donor; the caller tells workers. None if it cannot become one."""
        self._release(text)
        try:
            added = self.catalogue.add(
                namespace,
                token_ids[text.start : text.next],
                None,
                generation=text.generation,
                start_position=text.start,
            )
        except KVGraftError:
            self._discards.append(text.text_id)
            return None
        self._drops += [donor.donor_id for donor in added.evicted]
        if added.donor is None:
            self._discards.append(text.text_id)
            return None
        return added.donor.donor_id

    def seal(self, namespace: Namespace, token_ids: NDArray[np.int32], text: CapturedText) -> None:
        """Register a text that was complete in an earlier step, if there is enough of it."""
        if not self.rules.admits(text.next - text.start, text.generation):
            self.abandon(text)
            return
        donor_id = self.register(namespace, token_ids, text)
        if donor_id is not None:
            self._seals.append(Seal(text.text_id, donor_id))

    def abandon(self, text: CapturedText | None) -> None:
        """Give up a text; one that is complete or given up is ignored."""
        if text is not None and text.text_id in self._reserved:
            self._release(text)
            self._discards.append(text.text_id)

    def forget(self, donor_id: DonorId) -> None:
        """Drop a donor; one that is gone is ignored."""
        if self.catalogue.get(donor_id) is not None:
            self.catalogue.remove(donor_id)
            self._drops.append(donor_id)

    def take_news(self) -> tuple[tuple[Seal, ...], tuple[TextId, ...], tuple[DonorId, ...]]:
        """Seals, discards and drops since the last call."""
        news = tuple(self._seals), tuple(self._discards), tuple(self._drops)
        self._seals, self._discards, self._drops = [], [], []
        return news

    def check(self, open_texts: set[TextId]) -> None:
        """Verify the invariant and the catalogue's.

        Args:
            open_texts: Those that requests hold.

        Raises:
            CorruptCacheError: One does not hold.
        """
        self.catalogue.check()
        if set(self._reserved) != open_texts:
            raise CorruptCacheError(f"room is kept for texts {set(self._reserved)}, requests hold {open_texts}")
        total = self.catalogue.num_tokens + self._reserved_tokens
        if self._reserved_tokens != sum(self._reserved.values()) or total > self.catalogue.capacity_tokens:
            raise CorruptCacheError(f"{total} tokens of donors and texts, {self._reserved_tokens} of texts")

    def _opened(self, start: int, generation: int) -> CapturedText:
        text = CapturedText(next(self._text_ids), start, start, generation, start)
        self._reserved[text.text_id] = 0
        return text

    def _release(self, text: CapturedText) -> None:
        self._reserved_tokens -= self._reserved.pop(text.text_id)
