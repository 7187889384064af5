"""Copy the K/V of spans into private slots: all of a stretch or nothing, on all ranks or on none."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvgraft.integrations.sglang.flight import Flight, LoadedSpan
from kvgraft.integrations.sglang.kv_pool import Copy, KVPool
from kvgraft.types import Miss, MissReason

if TYPE_CHECKING:
    from torch import Tensor

    from kvgraft.integrations.sglang.donor_library import DonorLibrary
    from kvgraft.integrations.sglang.ranks import Ranks, Span
    from kvgraft.integrations.sglang.reports import RequestLog
    from kvgraft.integrations.sglang.tree import Tree


class Loader:
    """Loads stretches of spans. Donors are pinned in the tree for the time of the copy. Not thread-safe."""

    def __init__(self, tree: Tree, pool: KVPool, library: DonorLibrary, *, ranks: Ranks, log: RequestLog) -> None:
        self._tree, self._pool, self._library, self._ranks, self._log = tree, pool, library, ranks, log

    def load(self, flight: Flight, position: int, expected: int) -> Tensor | None:
        """Load the spans that follow one another from `position` on, and take them off the flight.

        Args:
            flight: Whose spans.
            position: Where the computed or exact part of the prompt ends.
            expected: Tokens that they must have together; -1 to load nothing.

        Returns:
            Slots, the caller's, or None if not all ranks have loaded `expected` tokens.
        """
        spans = flight.stretch(position)
        flight.drop(spans)
        loaded = self._try(flight, spans, expected)
        num_tokens = 0 if loaded is None else len(loaded[0])
        is_agreed = self._ranks.confirm(num_tokens) == num_tokens
        if not is_agreed:
            flight.miss = Miss(MissReason.ERROR, "tensor-parallel ranks disagree")
            self._log.count_error("agreement")
        if loaded is None:
            return None
        slots, items = loaded
        if not is_agreed:
            self._tree.free(slots)
            return None
        for item in items:
            assert item.span.donor is not None
            self._library.record_hit(item.span.donor, item.span.length)
        flight.loaded += items
        return slots

    def _try(self, flight: Flight, spans: list[Span], expected: int) -> tuple[Tensor, list[LoadedSpan]] | None:
        """Load on this rank; a failure is counted and becomes None."""
        if sum(span.length for span in spans) != expected:
            flight.miss = Miss(MissReason.NO_ROOM, "running requests need the slots")
            return None
        pins: list[object] = []
        started = time.perf_counter()
        try:
            return self._load(flight, spans, pins)
        except Exception as error:  # noqa: BLE001 - logged and counted; the request is computed instead
            flight.miss = self._log.failed("graft", flight.rid, error)
            return None
        finally:
            for pin in pins:
                self._tree.unpin(pin)
            flight.graft_ms += 1e3 * (time.perf_counter() - started)

    def _load(self, flight: Flight, spans: list[Span], pins: list[object]) -> tuple[Tensor, list[LoadedSpan]] | None:
        sources = [source for span in spans if (source := self._source(span, pins)) is not None]
        if len(sources) < len(spans):
            flight.miss = Miss(MissReason.NO_MATCH, "the donor was evicted before it could be copied")
            return None
        slots = self._tree.allocate(sum(span.length for span in spans))
        if slots is None:
            flight.miss = Miss(MissReason.NO_ROOM, "prompt and donors do not fit into the pool together")
            return None
        try:
            self._pool.copy([copy for copy, _ in sources], slots)
        except BaseException:
            self._tree.free(slots)
            raise
        return slots, [LoadedSpan(span, tier) for span, (_, tier) in zip(spans, sources, strict=True)]

    def _source(self, span: Span, pins: list[object]) -> tuple[Copy, str] | None:
        """Find the K/V of a span, pinned if the tree has them, and name the tier."""
        donor = span.donor
        if donor is None:
            return None
        position = donor.start_position + span.donor_start
        block = self._library.in_host(donor, span.donor_start, span.length)
        if block is not None:
            return Copy(block, position, span.start, span.length), "host"
        found = self._library.on_device(donor, span.donor_start, span.length)
        if found is None:
            return None
        pins.append(found.pin)
        return Copy(found.slots, position, span.start, span.length), "device"
