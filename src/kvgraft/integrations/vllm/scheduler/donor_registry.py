"""Donors, texts that are being captured to become donors, and the host memory of both."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from kvgraft.donors import DonorCatalogue
from kvgraft.donors.front import front_digest
from kvgraft.errors import CorruptCacheError, KVGraftError
from kvgraft.integrations.vllm.messages import Seal
from kvgraft.integrations.vllm.scheduler.no_stores import NoStores
from kvgraft.reuse.donor_rules import DonorRules
from kvgraft.reuse.stored import is_stored

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvgraft.donors import Donor
    from kvgraft.integrations.vllm.messages import TextId, Write
    from kvgraft.integrations.vllm.scheduler.stores import Stores
    from kvgraft.memory.store import KVStore
    from kvgraft.types import DonorId, Match, Namespace


@dataclass(slots=True, eq=False)
class CapturedText:
    """Text that is being captured and shall become a donor.

    Attributes:
        start: Position of its first token.
        stop: First position after it.
        next: First position that is not captured yet.
        known: Matches of it as it was opened: donors with which it begins leave once it is one.
    """

    text_id: TextId
    start: int
    stop: int
    generation: int
    next: int
    known: Sequence[Match] = ()

    @property
    def is_complete(self) -> bool:
        """Whether all of it is captured."""
        return self.next >= self.stop


class DonorRegistry:
    """Decides what workers keep in host memory. Their budgets hold because every token is counted before it is captured.

    Donors that a store has leave host memory by being forgotten there, and stay in the catalogue as stored ones.

    Invariants: tokens of donors and of texts are together at most `catalogue.capacity_tokens`; tokens of texts and of donors
    in host memory, or on their way there, at most `host_tokens`.
    """

    def __init__(
        self,
        capacity_tokens: int,
        *,
        min_run: int,
        max_generation: int,
        host_tokens: int | None = None,
        stores: Sequence[KVStore] = (),
        num_ranks: int = 1,
    ) -> None:
        """Make an empty registry over `stores`, in which each of `num_ranks` workers has spaces of its own.

        Texts become donors from `min_run` tokens and up to `max_generation`. `host_tokens` fit into the host memory of each
        worker; None for as many as into the catalogue.
        """
        self.catalogue = DonorCatalogue(capacity_tokens, min_run=min_run)
        self.rules = DonorRules(self.catalogue, min_run=min_run, max_generation=max_generation)
        self.stores: Stores | NoStores = NoStores()
        if stores:
            from kvgraft.integrations.vllm.scheduler.stores import Stores  # loaded where stores are set

            self.stores = Stores(
                stores, self.catalogue, num_ranks=num_ranks, min_run=min_run, max_generation=max_generation
            )
        self.num_refused_texts = self.num_replaced = 0
        self._min_run = min_run
        self._host_tokens = capacity_tokens if host_tokens is None else host_tokens
        self._kept_tokens = self._num_kept = 0
        self._promoting: dict[DonorId, int] = {}
        self._text_ids = count()
        self._reserved: dict[TextId, int] = {}
        self._reserved_tokens = 0
        self._drops: list[DonorId] = []
        self._discards: list[TextId] = []
        self._seals: list[Seal] = []
        self._writes: list[Write] = []

    @property
    def reserved_tokens(self) -> int:
        """Tokens of texts."""
        return self._reserved_tokens

    @property
    def num_stored(self) -> int:
        """Donors whose K/V lie in stores alone."""
        return len(self.catalogue) - self._num_kept

    def open(self, start: int, stop: int, generation: int) -> CapturedText | None:
        """Make room for the text of positions `[start, stop)`; None if it is too short, too derived or does not fit."""
        if not self.rules.admits(stop - start, generation):
            return None
        if not self._make_room(stop - start):
            self.num_refused_texts += 1
            return None
        return self._opened(start, stop, generation)

    def open_output(self, start: int, generation: int) -> CapturedText | None:
        """Begin text whose length is not known; `extend` makes room as it grows."""
        return self._opened(start, start, generation) if self.rules.admits(self._min_run, generation) else None

    def extend(self, text: CapturedText, stop: int) -> bool:
        """Make room for the text to reach `stop`, dropping donors of least value; False if that does not do."""
        if not self._make_room(stop - text.stop):
            return False
        self._reserved[text.text_id] += stop - text.stop
        self._reserved_tokens += stop - text.stop
        text.stop = stop
        return True

    def register(self, namespace: Namespace, token_ids: NDArray[np.int32], text: CapturedText) -> DonorId | None:
        """Turn a complete text into a donor, of which the caller informs workers. None if it cannot become one.

        Donors of a higher generation that have no other text leave for it, and those with which it begins.
        """
        self._release(text)
        self._discards.append(text.text_id)  # taken back once it is a donor
        tokens, before = token_ids[text.start : text.next], token_ids[: text.start]
        replaced = self.rules.replaced(namespace, tokens, text.generation)
        try:
            added = self.catalogue.add(
                namespace,
                tokens,
                None,
                generation=text.generation,
                start_position=text.start,
                front=front_digest(namespace.key, before),
                before=before,
            )
        except KVGraftError:
            return None
        for donor in added.evicted:
            self._gone(donor)
        if added.donor is None:
            return None
        self._kept_tokens += added.donor.num_tokens
        self._num_kept += 1
        try:
            for donor in replaced:
                self._replace(donor.donor_id, added.donor.donor_id)
            for donor in self.rules.superseded(text.known):
                self.forget(donor.donor_id)
            write = self.stores.write_of(added.donor)
        except Exception:
            self.forget(added.donor.donor_id)  # workers will not hear of it
            raise
        if write is not None:
            self._writes.append(write)
        self._discards.remove(text.text_id)
        return added.donor.donor_id

    def seal(self, namespace: Namespace, token_ids: NDArray[np.int32], text: CapturedText) -> None:
        """Register a text that was complete in an earlier step, if there is enough of it."""
        if not self.rules.admits(text.next - text.start, text.generation):
            self.abandon(text)
            return
        donor_id = self.register(namespace, token_ids, text)
        if donor_id is None:
            return
        try:
            self._seals.append(Seal(text.text_id, donor_id))
        except BaseException:
            self.take_back(text, donor_id)
            raise

    def take_back(self, text: CapturedText, donor_id: DonorId | None) -> None:
        """Forget a donor that was registered, and of which workers will not hear; they give its text up."""
        self._discards.append(text.text_id)
        if donor_id is not None:
            self.forget(donor_id)

    def abandon(self, text: CapturedText | None) -> None:
        """Give up a text; one that is complete or given up is ignored."""
        if text is not None and text.text_id in self._reserved:
            self._release(text)
            self._discards.append(text.text_id)

    def forget(self, donor_id: DonorId) -> None:
        """Drop a donor; one that is gone is ignored. A store keeps it."""
        if self.catalogue.get(donor_id) is not None:
            self._gone(self.catalogue.remove(donor_id))

    def forget_all(self) -> None:
        """Forget everything, in any state that it is in; workers are to forget it too. What stores keep is found again."""
        sealed = [seal.text_id for seal in self._seals]
        donors = self.catalogue.reset()
        self._drops += [donor.donor_id for donor in donors if not is_stored(donor) or donor.donor_id in self._promoting]
        self._discards += [*sealed, *self._reserved]
        self._kept_tokens = self._num_kept = self._reserved_tokens = 0
        for known in (self._promoting, self._reserved, self._seals, self._writes):
            known.clear()
        self.stores.reset()

    def promote(self, donor_id: DonorId) -> bool:
        """Make room in host memory for a stored donor, on its way there until `promoted`; False if there is none.

        Other donors leave host memory for it only if a store has them.
        """
        donor = self.catalogue.get(donor_id)
        if donor is None or not is_stored(donor) or donor_id in self._promoting:
            return False
        short = self._used_tokens + donor.num_tokens - self._host_tokens
        if short > 0:
            self._leave_host(short, only_stored=True)
        if self._used_tokens + donor.num_tokens > self._host_tokens:
            return False
        self._promoting[donor_id] = donor.num_tokens
        return True

    def promoted(self, donor_id: DonorId, *, is_kept: bool) -> None:
        """Note whether workers kept a donor that was on its way into host memory."""
        num_tokens = self._promoting.pop(donor_id, None)
        if num_tokens is None:
            return
        if is_kept and self.catalogue.get(donor_id) is not None:
            self.catalogue.rebind(donor_id, None)
            self._kept_tokens += num_tokens
            self._num_kept += 1
        else:
            self._drops.append(donor_id)  # some ranks may have kept it

    @property
    def news(self) -> tuple[tuple[Seal, ...], tuple[TextId, ...], tuple[DonorId, ...]]:
        """Seals, discards and drops that workers have not been sent."""
        return tuple(self._seals), tuple(self._discards), tuple(self._drops)

    @property
    def writes(self) -> tuple[Write, ...]:
        """Donors to store, of which workers have not been sent."""
        return tuple(self._writes)

    def news_were_sent(self) -> None:
        """Forget what workers are sent now."""
        for sent in (self._seals, self._discards, self._drops, self._writes):
            sent.clear()

    def follow_stores(self) -> None:
        """Take over what stores have got and lost; costs nothing if nothing has changed."""
        catalogue = self.catalogue
        self.stores.news(self._reserved_tokens)
        over = catalogue.num_tokens + self._reserved_tokens - catalogue.capacity_tokens
        for donor in catalogue.evict(over):
            self._gone(donor)

    def check(self, open_texts: set[TextId]) -> None:
        """Verify the invariant and the catalogue's, while requests hold `open_texts`.

        Raises:
            CorruptCacheError: One does not hold.
        """
        self.catalogue.check()
        if set(self._reserved) != open_texts:
            raise CorruptCacheError(f"room is kept for texts {set(self._reserved)}, requests hold {open_texts}")
        total = self.catalogue.num_tokens + self._reserved_tokens
        if self._reserved_tokens != sum(self._reserved.values()) or total > self.catalogue.capacity_tokens:
            raise CorruptCacheError(f"{total} tokens of donors and texts, {self._reserved_tokens} of texts")
        kept = [donor.num_tokens for donor in self.catalogue if not is_stored(donor)]
        if (len(kept), sum(kept)) != (self._num_kept, self._kept_tokens) or self._used_tokens > self._host_tokens:
            raise CorruptCacheError(f"{sum(kept)} tokens of donors in host memory, {self._kept_tokens} counted")

    @property
    def _used_tokens(self) -> int:
        """Tokens of host memory that are taken or promised."""
        return self._kept_tokens + self._reserved_tokens + sum(self._promoting.values())

    def _make_room(self, num_tokens: int) -> bool:
        """Make room for text, in host memory and in the catalogue, at the cost of donors of least value."""
        catalogue = self.catalogue
        short = self._used_tokens + num_tokens - self._host_tokens
        if short > 0:
            self._leave_host(short)
        short = catalogue.num_tokens + self._reserved_tokens + num_tokens - catalogue.capacity_tokens
        if short > 0:
            for donor in catalogue.evict(short):
                self._gone(donor)
        fits = self._used_tokens + num_tokens <= self._host_tokens
        return fits and catalogue.num_tokens + self._reserved_tokens + num_tokens <= catalogue.capacity_tokens

    def _leave_host(self, num_tokens: int, *, only_stored: bool = False) -> None:
        """Take donors of least value out of host memory: those that a store has become stored ones, others are lost."""
        leaving = []
        for donor in self.catalogue.victims():
            if num_tokens <= 0:
                break
            if not is_stored(donor) and (not only_stored or self.stores.donors.holder_of(donor.donor_id) is not None):
                leaving.append(donor)
                num_tokens -= donor.num_tokens
        for donor in leaving:
            if self.stores.donors.demote(donor.donor_id):
                self._leaves(donor)
            else:
                self.forget(donor.donor_id)

    def _replace(self, donor_id: DonorId, heir: DonorId) -> None:
        """Drop a donor for a better one of its text, if it is still there; what stores have of it is not taken back."""
        if self.catalogue.get(donor_id) is not None:
            self.catalogue.inherit(heir, donor_id)
            self.stores.donors.unbind(donor_id)
            self._gone(self.catalogue.remove(donor_id))
            self.num_replaced += 1

    def _gone(self, donor: Donor) -> None:
        """Take over that a donor has left the catalogue; it comes back once there is room if a store holds it."""
        if not is_stored(donor):
            self._leaves(donor)
        elif donor.donor_id in self._promoting:
            self._drops.append(donor.donor_id)  # workers give up what is on its way, and say so

    def _leaves(self, donor: Donor) -> None:
        self._kept_tokens -= donor.num_tokens
        self._num_kept -= 1
        self._drops.append(donor.donor_id)

    def _opened(self, start: int, stop: int, generation: int) -> CapturedText:
        """Return a text with the room that was made for it."""
        text = CapturedText(next(self._text_ids), start, stop, generation, start)
        self._reserved[text.text_id] = stop - start
        self._reserved_tokens += stop - start
        return text

    def _release(self, text: CapturedText) -> None:
        self._reserved_tokens -= self._reserved.pop(text.text_id)
