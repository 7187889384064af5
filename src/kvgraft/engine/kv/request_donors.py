"""Carry out what becomes a donor: `reuse.DonorRules` decides, this keeps the K/V.

Where all layers share one space of slots, a donor refers to the slots of the request that computed it. Donors of hybrid
models are copies on the host, because the window slots of their text are given back as soon as no row can see them. Models
with layers that keep states have none: nothing could be made of their K/V at another place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.donors import DonorQuery, DonorText
from kvgraft.reuse.lineage import ComputedRun

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from numpy.typing import NDArray

    from kvgraft.engine.kv.kv_space import KVSpace
    from kvgraft.engine.kv.request_kv import RequestKV
    from kvgraft.reuse.donor_rules import DonorRules
    from kvgraft.types import DonorId, TokenArray


class RequestDonors(ABC):
    """Keeps the text of requests as donors."""

    def __init__(self, space: KVSpace, rules: DonorRules) -> None:
        self._space = space
        self._rules = rules

    @abstractmethod
    def register(self, kv: RequestKV, token_ids: TokenArray) -> None:
        """Register what the request has computed of `token_ids`; may be called again when there is more."""

    def heal(self, kv: RequestKV, token_ids: TokenArray, donor_ids: Iterable[DonorId]) -> list[DonorId]:
        """Put exact donors of the same text into the place of approximate ones that lie in what `kv` has exactly.

        Returns:
            Those that stay: no exact donors have all of their text yet, or requests are about to copy them.
        """
        del kv, token_ids
        return self.retire(donor_ids)

    def retire(self, donor_ids: Iterable[DonorId]) -> list[DonorId]:
        """Remove approximate donors with text that exact ones have; what they have saved counts for these from now on.

        Returns:
            Those that stay: no exact donors have all of their text yet, or requests are about to copy it.

        Complexity: a search per donor.
        """
        catalogue, left = self._space.donors, []
        for donor_id in donor_ids:
            donor = catalogue.get(donor_id)
            if donor is None:
                continue
            exact = catalogue.find(DonorQuery(donor.namespace, donor.token_ids, max_generation=0, with_stored=False))
            if catalogue.is_pinned(donor_id) or not self._rules.covers(exact, donor.num_tokens, 0):
                left.append(donor_id)
                continue
            saved = catalogue.saved_tokens(donor_id)
            self._space.remove_donor(donor_id)
            for match in exact:
                catalogue.record_hit(match.donor_id, saved * match.length // donor.num_tokens)
        return left

    def join(self, donor_ids: Iterable[DonorId]) -> list[DonorId]:
        """Make one donor of those that were made of one text piece by piece; returns those that there are then."""
        return list(donor_ids)

    def _add_donor(
        self,
        text: DonorText,
        add: Callable[[], DonorId | None],
        continued: Collection[DonorId] = (),
        slots: NDArray[np.int64] | None = None,
    ) -> DonorId | None:
        """Let `add` make a donor of `text`; stores go on from what they have of it.

        Args:
            text: Of the donor.
            add: Removes `continued` and makes the donor.
            continued: Donors with which the text begins.
            slots: Where its K/V lie; None if not in slots.
        """
        if self._space.stores is None:
            return add()
        writes, start = self._space.stores.writes, text.start_position
        carried = writes.carried(
            text.namespace, text.token_ids, text.generation, continued, slots, start_position=start
        )
        donor_id = add()
        writes.registered(donor_id, carried)
        return donor_id


class NoDonors(RequestDonors):
    """Nothing becomes a donor."""

    def register(self, kv: RequestKV, token_ids: TokenArray) -> None:
        """Keep nothing."""


class SlotDonors(RequestDonors):
    """Donors that share the slots of the request."""

    def register(self, kv: RequestKV, token_ids: TokenArray) -> None:
        """Register a request without a graft as a whole, of a grafted one each computed run."""
        if kv.lineage.is_approximate:
            for run in self._rules.runs(kv.lineage, kv.lineage.prefix_len, len(token_ids)):
                self._add_once(kv, token_ids, run)
            return
        if not self._rules.admits(len(token_ids), 0):
            return
        known = self._space.donors.find(DonorQuery(kv.namespace, token_ids, max_generation=0, with_stored=False))
        if self._rules.covers(known, len(token_ids), 0):
            return
        self._add(
            kv,
            token_ids,
            ComputedRun(0, len(token_ids), 0),
            [donor.donor_id for donor in self._rules.superseded(known)],
        )

    def heal(self, kv: RequestKV, token_ids: TokenArray, donor_ids: Iterable[DonorId]) -> list[DonorId]:
        """See `RequestDonors.heal`. The text of the others is kept once, where the request has it."""
        catalogue, left = self._space.donors, []
        for donor_id in donor_ids:
            donor = catalogue.get(donor_id)
            if donor is None:
                continue
            start, stop = donor.start_position, donor.start_position + donor.num_tokens
            if stop > len(token_ids):  # not looked up in vain for every piece before its end
                left.append(donor_id)
            elif not self.retire([donor_id]):
                continue
            elif catalogue.is_pinned(donor_id):
                left.append(donor_id)
            elif np.array_equal(token_ids[start:stop], donor.token_ids):
                self._add(kv, token_ids, ComputedRun(start, stop, 0), [donor_id])
        return left

    def _add_once(self, kv: RequestKV, token_ids: TokenArray, run: ComputedRun) -> None:
        """Register a run of a grafted request; a longer version replaces what was registered from the same start."""
        known = kv.registered.get(run.start)
        continued: list[DonorId] = []
        if known is not None:
            donor = self._space.donors.get(known)
            if donor is not None and donor.num_tokens == run.stop - run.start:
                return
            if donor is not None and not self._space.donors.is_pinned(known):
                continued.append(known)
        donor_id = self._add(kv, token_ids, run, continued)
        if donor_id is not None:
            kv.registered[run.start] = donor_id

    def _add(
        self, kv: RequestKV, token_ids: TokenArray, run: ComputedRun, continued: Collection[DonorId]
    ) -> DonorId | None:
        """Register a run instead of donors that it continues."""
        text = DonorText.of_run(kv.namespace, token_ids, run)
        slots = kv.kv_indices[run.start : run.stop].copy()
        saved = sum(self._space.donors.saved_tokens(known) for known in continued)

        def add() -> DonorId | None:
            for known in continued:
                self._space.remove_donor(known)
            return self._space.add_donor(text, slots)

        donor_id = self._add_donor(text, add, continued, slots)
        if donor_id is not None:
            self._space.donors.record_hit(donor_id, saved)
            kv.made.append(donor_id)
        return donor_id
