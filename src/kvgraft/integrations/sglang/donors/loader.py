"""Copy the K/V of spans into private slots: all of them or nothing, on all ranks or on none."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from kvgraft.graft.executor import SpanCopy
from kvgraft.integrations.sglang.donors.texts import HostBlockKV, TreeKV
from kvgraft.types import Miss, MissReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from kvgraft.donors import Donor
    from kvgraft.integrations.sglang.donors.keeper import DonorKeeper
    from kvgraft.integrations.sglang.donors.kv_buffers import KVBuffers
    from kvgraft.integrations.sglang.donors.tree import DonorTree
    from kvgraft.integrations.sglang.planning.ranks import Ranks
    from kvgraft.integrations.sglang.planning.spans import LoadSpan
    from kvgraft.integrations.sglang.reporting.reports import RequestLog
    from kvgraft.integrations.sglang.request_state import SGLangRequest
    from kvgraft.memory.block import KVBlock

_Found = TypeVar("_Found")


@dataclass(frozen=True, eq=False)
class Loader:
    """Loads adjoining spans. Donors are pinned in the tree for the time of the copy. Not thread-safe."""

    tree: DonorTree
    buffers: KVBuffers
    keeper: DonorKeeper
    ranks: Ranks
    log: RequestLog

    def load(self, state: SGLangRequest, position: int, expected: int) -> Tensor | None:
        """Load the spans that follow one another from `position` on, and take them off the plan.

        Returns their slots, which are the caller's, or None if not all ranks have loaded `expected` tokens; -1 loads nothing.
        """
        spans = state.adjoining(position)
        state.drop(spans)
        pins: list[object] = []
        started = time.perf_counter()
        try:
            slots = self._load(state, spans, expected, pins)
        finally:
            for pin in pins:
                self.tree.unpin(pin)
            state.graft_ms += 1e3 * (time.perf_counter() - started)
        return slots

    def _load(self, state: SGLangRequest, spans: list[LoadSpan], expected: int, pins: list[object]) -> Tensor | None:
        # Ranks that have pinned the same evict the same to make room.
        copies = self._on_all(state, self._tried(state, partial(self._copies, state, spans, expected, pins)))
        if copies is None:
            return None
        slots = self._tried(state, partial(self._copied, state, copies))
        if self._on_all(state, slots) is None:
            if slots is not None:
                self.tree.free(slots)
            return None
        donors = [span.donor for span in spans if span.donor is not None]
        for donor, span in zip(donors, spans, strict=True):
            self.keeper.record_hit(donor, span.length)
        state.loaded(spans, list(map(_source, donors, copies)))
        return slots

    def _tried(self, state: SGLangRequest, act: Callable[[], _Found | None]) -> _Found | None:
        """Act on this rank; a failure is counted and becomes None."""
        try:
            return act()
        except Exception as error:  # noqa: BLE001 - logged and counted; the request is computed instead
            state.missed(self.log.failed("graft", state.rid, error))
            return None

    def _on_all(self, state: SGLangRequest, found: _Found | None) -> _Found | None:
        """Return what was found if no rank has None instead; that ranks disagree is counted."""
        has = int(found is not None)
        if self.ranks.confirm(has) == has:
            return found
        state.missed(Miss(MissReason.ERROR, "tensor-parallel ranks disagree"))
        self.log.count_error()
        return None

    def _copies(
        self, state: SGLangRequest, spans: list[LoadSpan], expected: int, pins: list[object]
    ) -> list[SpanCopy] | None:
        """Find the K/V of all spans, or None; what the tree has of them is pinned."""
        if sum(span.length for span in spans) != expected:
            state.missed(Miss(MissReason.NO_ROOM, "running requests need the slots"))
            return None
        copies = [copy for span in spans if (copy := self._copy_of(span, pins)) is not None]
        if len(copies) < len(spans):
            state.missed(Miss(MissReason.NO_MATCH, "the donor was evicted before it could be copied"))
            return None
        return copies

    def _copied(self, state: SGLangRequest, copies: list[SpanCopy]) -> Tensor | None:
        """Return new slots with `copies` in them, or None where there is no room."""
        slots = self.tree.allocate(sum(copy.length for copy in copies))
        if slots is None:
            state.missed(Miss(MissReason.NO_ROOM, "prompt and donors do not fit into the pool together"))
            return None
        try:
            self.buffers.copy(copies, slots)
        except BaseException:
            self.tree.free(slots)
            raise
        return slots

    def _copy_of(self, span: LoadSpan, pins: list[object]) -> SpanCopy | None:
        """Find the K/V of a span, pinned if the tree has them."""
        donor = span.donor
        if donor is None:
            return None
        kv: Tensor | KVBlock | None = self.keeper.in_host(donor, span.donor_start, span.length)
        if kv is None:
            found = self.keeper.on_device(donor, span.donor_start, span.length)
            if found is None:
                return None
            kv, pin = found
            pins.append(pin)
        position = donor.start_position + span.donor_start
        return SpanCopy(self.buffers.source(kv), position, span.start, span.length)


def _source(donor: Donor, copy: SpanCopy) -> dict[str, object]:
    """Return the request that computed a span, the position in its text, and the tier from which it was copied."""
    kv = donor.kv
    assert isinstance(kv, TreeKV | HostBlockKV)
    origin, tier = (kv.text.origin, "device") if isinstance(kv, TreeKV) else (kv.origin, "host")
    return {"request": origin.request, "attempt": origin.attempt, "position": copy.source_start, "tier": tier}
