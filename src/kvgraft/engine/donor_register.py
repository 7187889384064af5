"""Carry out what becomes a donor: `reuse.Registration` decides, this keeps the K/V.

Where all layers share one space of slots, a donor refers to the slots of the request that computed it. Donors of hybrid
models are copies on the host, because the window slots of their text are given back as soon as no row can see them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.donors.front import front_digest
from kvgraft.engine.kv_space import HostKV

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from kvgraft.donors import Donor
    from kvgraft.engine.hybrid_space import HybridKVSpace
    from kvgraft.engine.kv_space import KVSpace
    from kvgraft.engine.request_kv import RequestKV
    from kvgraft.engine.sliding_windows import SlidingWindows
    from kvgraft.reuse.lineage import ComputedRun
    from kvgraft.reuse.registration import Registration
    from kvgraft.types import DonorId, TokenArray


class DonorRegister(ABC):
    """Keeps the text of requests as donors."""

    def __init__(self, space: KVSpace, rules: Registration) -> None:
        self._space = space
        self._rules = rules

    @abstractmethod
    def register(self, kv: RequestKV, token_ids: TokenArray) -> None:
        """Register what the request has computed of `token_ids`; may be called again when there is more."""

    def heal(self, kv: RequestKV, token_ids: TokenArray, donor_ids: Iterable[DonorId]) -> list[DonorId]:
        """Put exact donors of the same text into the place of approximate ones that lie in what `kv` has exactly.

        Returns:
            Those that stay: nobody has all of their text yet, or requests are about to copy them.
        """
        del kv, token_ids
        return self.retire(donor_ids)

    def retire(self, donor_ids: Iterable[DonorId]) -> list[DonorId]:
        """Remove approximate donors whose text exact ones have; what they have saved counts for these from now on.

        Returns:
            Those that stay: nobody has all of their text yet, or requests are about to copy it.

        Complexity: a search per donor.
        """
        catalogue, left = self._space.donors, []
        for donor_id in donor_ids:
            donor = catalogue.get(donor_id)
            if donor is None:
                continue
            exact = catalogue.find(donor.namespace, donor.token_ids, max_generation=0, with_far=False)
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


class SlotDonors(DonorRegister):
    """Donors that share the slots of the request."""

    def register(self, kv: RequestKV, token_ids: TokenArray) -> None:
        """Register a request without a graft as a whole, of a grafted one each computed run."""
        if kv.lineage.is_approximate:
            for run in self._rules.runs(kv.lineage, kv.lineage.given_len, len(token_ids)):
                self._add_once(kv, token_ids, run)
            return
        if not self._rules.admits(len(token_ids), 0):
            return
        known = self._space.donors.find(kv.namespace, token_ids, max_generation=0, with_far=False)
        if self._rules.covers(known, len(token_ids), 0):
            return
        self._add(kv, token_ids, (0, len(token_ids), 0), [donor.donor_id for donor in self._rules.superseded(known)])

    def heal(self, kv: RequestKV, token_ids: TokenArray, donor_ids: Iterable[DonorId]) -> list[DonorId]:
        """See `DonorRegister.heal`. The text of the others is kept once: who copies both copies from where it was read."""
        catalogue, left = self._space.donors, []
        for donor_id in donor_ids:
            donor = catalogue.get(donor_id)
            if donor is None:
                continue
            start, stop = donor.start_position, donor.start_position + donor.num_tokens
            if stop > len(token_ids):  # not looked up in vain for every piece in front of its end
                left.append(donor_id)
            elif not self.retire([donor_id]):
                continue
            elif catalogue.is_pinned(donor_id):
                left.append(donor_id)
            elif np.array_equal(token_ids[start:stop], donor.token_ids):
                self._add(kv, token_ids, (start, stop, 0), [donor_id])
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
        self, kv: RequestKV, token_ids: TokenArray, run: tuple[int, int, int], continued: Collection[DonorId]
    ) -> DonorId | None:
        """Register a run instead of donors that it continues."""
        start, stop, generation = run
        slots, stores = kv.kv_indices[start:stop].copy(), self._space.stores
        text = token_ids[start:stop]
        carried = None
        if stores is not None:
            carried = stores.writes.carried(kv.namespace, text, generation, continued, slots, start_position=start)
        saved = sum(self._space.donors.saved_tokens(known) for known in continued)
        for known in continued:
            self._space.remove_donor(known)
        front = front_digest(kv.namespace.key, token_ids[:start])
        donor_id = self._space.add_donor(
            kv.namespace, text, slots, generation=generation, start_position=start, front=front
        )
        if donor_id is not None:
            self._space.donors.record_hit(donor_id, saved)
        if stores is not None and carried is not None:
            stores.writes.registered(donor_id, carried)
        if donor_id is not None:
            kv.made.append(donor_id)
        return donor_id


class HostDonors(DonorRegister):
    """Donors of hybrid models: what was computed since the last call, copied to the host.

    A stretch whose window K/V were not captured, for want of host memory, is left out.
    """

    def __init__(self, space: HybridKVSpace, rules: Registration, windows: SlidingWindows) -> None:
        super().__init__(space, rules)
        self._hybrid = space
        self._windows = windows

    def register(self, kv: RequestKV, token_ids: TokenArray) -> None:
        """Register each run that was computed since the last call and that donors do not have yet."""
        row = kv.windows
        if row is None or not row.is_donor:
            return
        done = row.registered_len
        for start, stop, generation in self._rules.runs(kv.lineage, kv.lineage.given_len, len(token_ids)):
            first = max(start, done)
            is_admitted = self._rules.admits(stop - first, generation)
            if is_admitted and not self._rules.is_known(kv.namespace, token_ids[first:stop], generation):
                self._add(kv, token_ids, first, stop, generation)
        row.registered_len = max(done, len(token_ids))
        self._windows.forget_captured(kv)

    def join(self, donor_ids: Iterable[DonorId]) -> list[DonorId]:
        """See `DonorRegister.join`: pieces are copies of their own here, and a text would be found in as many parts."""
        catalogue = self._space.donors
        found = (catalogue.get(donor_id) for donor_id in donor_ids if not catalogue.is_pinned(donor_id))
        parts = sorted((d for d in found if d and isinstance(d.kv, HostKV)), key=lambda donor: donor.start_position)
        runs: list[list[Donor]] = []
        for part in parts:
            if runs and runs[-1][-1].start_position + runs[-1][-1].num_tokens == part.start_position:
                runs[-1].append(part)
            else:
                runs.append([part])
        joined = (run[0].donor_id if len(run) == 1 else self._joined(run) for run in runs)
        return [donor_id for donor_id in joined if donor_id is not None]

    def _joined(self, parts: Sequence[Donor]) -> DonorId | None:
        first, stores = parts[0], self._space.stores
        carried = None
        if stores is not None:
            text = np.concatenate([part.token_ids for part in parts])
            carried = stores.writes.carried(
                first.namespace, text, first.generation, start_position=first.start_position
            )
        donor_id = self._hybrid.join_host_donors(parts)
        if stores is not None and carried is not None:
            stores.writes.registered(donor_id, carried)
        return donor_id

    def _add(self, kv: RequestKV, token_ids: TokenArray, start: int, stop: int, generation: int) -> None:
        for first, block in self._windows.known_parts(kv, start, stop):
            last = first + block.num_tokens
            if self._rules.admits(last - first, generation):
                text, stores = token_ids[first:last], self._space.stores
                carried = None
                if stores is not None:
                    carried = stores.writes.carried(kv.namespace, text, generation, start_position=first)
                donor_id = self._hybrid.add_host_donor(
                    kv.namespace,
                    text,
                    kv.kv_indices[first:last],
                    block,
                    generation=generation,
                    start_position=first,
                    front=front_digest(kv.namespace.key, token_ids[:first]),
                )
                if stores is not None and carried is not None:
                    stores.writes.registered(donor_id, carried)
                if donor_id is not None:
                    kv.made.append(donor_id)
