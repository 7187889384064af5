"""Copy the K/V of spans into private slots: all of them or nothing, on all ranks or on none."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvgraft.graft.executor import SpanCopy
from kvgraft.integrations.sglang.donors.texts import HostBlockKV, TreeKV
from kvgraft.types import Miss, MissReason

if TYPE_CHECKING:
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
        loaded = self._try(state, spans, expected)
        num_tokens = 0 if loaded is None else len(loaded[0])
        is_agreed = self.ranks.confirm(num_tokens) == num_tokens
        if not is_agreed:
            state.missed(Miss(MissReason.ERROR, "tensor-parallel ranks disagree"))
            self.log.count_error()
        if loaded is None:
            return None
        slots, sources = loaded
        if not is_agreed:
            self.tree.free(slots)
            return None
        for span in spans:
            assert span.donor is not None
            self.keeper.record_hit(span.donor, span.length)
        state.loaded(spans, sources)
        return slots

    def _try(
        self, state: SGLangRequest, spans: list[LoadSpan], expected: int
    ) -> tuple[Tensor, list[dict[str, object]]] | None:
        """Load on this rank; a failure is counted and becomes None."""
        if sum(span.length for span in spans) != expected:
            state.missed(Miss(MissReason.NO_ROOM, "running requests need the slots"))
            return None
        pins: list[object] = []
        started = time.perf_counter()
        try:
            return self._load(state, spans, pins)
        except Exception as error:  # noqa: BLE001 - logged and counted; the request is computed instead
            state.missed(self.log.failed("graft", state.rid, error))
            return None
        finally:
            for pin in pins:
                self.tree.unpin(pin)
            state.graft_ms += 1e3 * (time.perf_counter() - started)

    def _load(
        self, state: SGLangRequest, spans: list[LoadSpan], pins: list[object]
    ) -> tuple[Tensor, list[dict[str, object]]] | None:
        copies = [copy for span in spans if (copy := self._copy_of(span, pins)) is not None]
        # Also where nothing can be copied: what makes room is evicted from the trees of all ranks or of none.
        slots = self.tree.allocate(sum(span.length for span in spans))
        if slots is None:
            state.missed(Miss(MissReason.NO_ROOM, "prompt and donors do not fit into the pool together"))
            return None
        if len(copies) < len(spans):
            self.tree.free(slots)
            state.missed(Miss(MissReason.NO_MATCH, "the donor was evicted before it could be copied"))
            return None
        try:
            self.buffers.copy(copies, slots)
        except BaseException:
            self.tree.free(slots)
            raise
        return slots, [_source(span.donor, copy) for span, copy in zip(spans, copies, strict=True) if span.donor]

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
