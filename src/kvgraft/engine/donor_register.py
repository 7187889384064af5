"""Carry out what becomes a donor: `reuse.Registration` decides, this keeps the K/V.

Where all layers share one space of slots, a donor refers to the slots of the request that computed it. Donors of hybrid
models are copies on the host, because the window slots of their text are given back as soon as no row can see them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvgraft.engine.hybrid_space import HybridKVSpace
    from kvgraft.engine.kv_space import KVSpace
    from kvgraft.engine.request_kv import RequestKV
    from kvgraft.engine.sliding_windows import SlidingWindows
    from kvgraft.reuse.registration import Registration
    from kvgraft.types import DonorId, TokenArray


class DonorRegister(ABC):
    """Keeps the text of requests as donors."""

    @abstractmethod
    def register(self, kv: RequestKV, token_ids: TokenArray) -> None:
        """Register what the request has computed of `token_ids`; may be called again when there is more."""


class SlotDonors(DonorRegister):
    """Donors that share the slots of the request."""

    def __init__(self, space: KVSpace, rules: Registration) -> None:
        self._space = space
        self._rules = rules

    def register(self, kv: RequestKV, token_ids: TokenArray) -> None:
        """Register a request without a graft as a whole, of a grafted one each computed run."""
        if kv.lineage.is_approximate:
            for run in self._rules.runs(kv.lineage, kv.lineage.given_len, len(token_ids)):
                self._add_once(kv, token_ids, *run)
            return
        if not self._rules.admits(len(token_ids), 0):
            return
        known = self._space.donors.find(kv.namespace, token_ids, max_generation=0)
        if self._rules.covers(known, len(token_ids), 0):
            return
        for donor in self._rules.superseded(known):
            self._space.remove_donor(donor.donor_id)
        self._add(kv, token_ids, 0, len(token_ids), 0)

    def _add_once(self, kv: RequestKV, token_ids: TokenArray, start: int, stop: int, generation: int) -> None:
        """Register a run of a grafted request; a longer version replaces what was registered from the same start."""
        known = kv.registered.get(start)
        if known is not None:
            donor = self._space.donors.get(known)
            if donor is not None and donor.num_tokens == stop - start:
                return
            if donor is not None and not self._space.donors.is_pinned(known):
                self._space.remove_donor(known)
        donor_id = self._add(kv, token_ids, start, stop, generation)
        if donor_id is not None:
            kv.registered[start] = donor_id

    def _add(self, kv: RequestKV, token_ids: TokenArray, start: int, stop: int, generation: int) -> DonorId | None:
        return self._space.add_donor(
            kv.namespace,
            token_ids[start:stop],
            kv.kv_indices[start:stop].copy(),
            generation=generation,
            start_position=start,
        )


class HostDonors(DonorRegister):
    """Donors of hybrid models: what was computed since the last call, copied to the host.

    A stretch whose window K/V were not captured, for want of host memory, is left out.
    """

    def __init__(self, space: HybridKVSpace, rules: Registration, windows: SlidingWindows) -> None:
        self._space = space
        self._rules = rules
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

    def _add(self, kv: RequestKV, token_ids: TokenArray, start: int, stop: int, generation: int) -> None:
        for first, block in self._windows.known_parts(kv, start, stop):
            last = first + block.num_tokens
            if self._rules.admits(last - first, generation):
                self._space.add_host_donor(
                    kv.namespace,
                    token_ids[first:last],
                    kv.kv_indices[first:last],
                    block,
                    generation=generation,
                    start_position=first,
                )
