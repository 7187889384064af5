"""Copy the K/V of spans into private slots: all of them or nothing, on all ranks or on none."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from kvgraft.graft.executor import SpanCopy
from kvgraft.integrations.sglang.donors.texts import UNKNOWN, HostBlockKV, Origin, TreeKV
from kvgraft.types import Miss, MissReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from kvgraft.integrations.sglang.donors.continuations import Continuations
    from kvgraft.integrations.sglang.donors.keeper import DonorKeeper
    from kvgraft.integrations.sglang.donors.kv_buffers import KVBuffers
    from kvgraft.integrations.sglang.donors.tree import DonorTree
    from kvgraft.integrations.sglang.planning.ranks import Ranks
    from kvgraft.integrations.sglang.planning.spans import LoadSpan
    from kvgraft.integrations.sglang.reporting.reports import RequestLog
    from kvgraft.integrations.sglang.request_state import SGLangRequest

_Result = TypeVar("_Result")


class _Part(NamedTuple):
    """Tokens of a span with the K/V of one request, and the source that reports name for them."""

    span: LoadSpan
    source: dict[str, object]


class _Found(NamedTuple):
    """The K/V of a span: how they are copied, and which requests had them."""

    copy: SpanCopy
    parts: list[_Part]


@dataclass(frozen=True, eq=False)
class Loader:
    """Loads adjoining spans. Donors are pinned in the tree for the time of the copy. Not thread-safe."""

    tree: DonorTree
    buffers: KVBuffers
    keeper: DonorKeeper
    continuations: Continuations
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
        found = self._on_all(state, self._tried(state, partial(self._find_all, state, spans, expected, pins)))
        if found is None:
            return None
        slots = self._tried(state, partial(self._copied, state, [each.copy for each in found]))
        is_agreed = False
        try:
            is_agreed = self._on_all(state, slots) is not None
        finally:
            if not is_agreed and slots is not None:
                self.tree.free(slots)
        if not is_agreed or slots is None:
            return None
        try:
            parts = [part for each in found for part in each.parts]
            state.loaded([part.span for part in parts], [part.source for part in parts])
            for span in spans:
                assert span.donor is not None
                self.keeper.record_hit(span.donor, span.length)
        except BaseException:
            self.tree.free(slots)
            state.withdraw(spans[0].start)
            raise
        return slots

    def _tried(self, state: SGLangRequest, act: Callable[[], _Result | None]) -> _Result | None:
        """Act on this rank; a failure is counted and becomes None."""
        try:
            return act()
        except Exception as error:  # noqa: BLE001 - logged and counted; the request is computed instead
            state.missed(self.log.failed("graft", state.rid, error))
            return None

    def _on_all(self, state: SGLangRequest, found: _Result | None) -> _Result | None:
        """Return what was found if no rank has None instead; that ranks disagree is counted."""
        has = int(found is not None)
        if self.ranks.confirm(has) == has:
            return found
        state.missed(Miss(MissReason.ERROR, "tensor-parallel ranks disagree"))
        self.log.count_error()
        return None

    def _find_all(
        self, state: SGLangRequest, spans: list[LoadSpan], expected: int, pins: list[object]
    ) -> list[_Found] | None:
        """Find the K/V of all spans, or None; what the tree has of them is pinned."""
        if sum(span.length for span in spans) != expected:
            state.missed(Miss(MissReason.NO_ROOM, "running requests need the slots"))
            return None
        all_found = [found for span in spans if (found := self._find(span, pins)) is not None]
        if len(all_found) < len(spans):
            state.missed(Miss(MissReason.NO_MATCH, "the donor was evicted before it could be copied"))
            return None
        return all_found

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

    def _find(self, span: LoadSpan, pins: list[object]) -> _Found | None:
        """Find the K/V of a span, pinned if the tree has them."""
        donor = span.donor
        if donor is None:
            return None
        position = donor.start_position + span.donor_start
        block = self.keeper.in_host(donor, span.donor_start, span.length)
        if block is not None:
            assert isinstance(donor.kv, HostBlockKV)
            copy = SpanCopy(self.buffers.source(block), position, span.start, span.length)
            return _Found(copy, [_part(span, donor.kv.origin, position, "host")])
        found = self.keeper.on_device(donor, span.donor_start, span.length)
        if found is None:
            return None
        slots, pin = found
        pins.append(pin)
        copy = SpanCopy(self.buffers.source(slots), position, span.start, span.length)
        if span.goes_on:
            return _Found(copy, list(self._by_holder(span, slots)))
        assert isinstance(donor.kv, TreeKV)
        return _Found(copy, [_part(span, donor.kv.text.origin, position, "device")])

    def _by_holder(self, span: LoadSpan, slots: Tensor) -> Iterator[_Part]:
        """Yield the parts of what a prompt goes on from, whose K/V lie in `slots`: branches have more than one."""
        position = span.start
        for text, start, length, first in self.continuations.held_by(slots):
            if span.start + first > position:
                yield _part(span.part(position, span.start + first), Origin(UNKNOWN), position, "device")
            position = span.start + first + length
            part = span.part(position - length, position)
            yield _part(part, text.origin, text.base + start, "device")
        if position < span.end:
            yield _part(span.after(position), Origin(UNKNOWN), position, "device")


def _part(span: LoadSpan, origin: Origin, position: int, tier: str) -> _Part:
    source = {"request": origin.request, "attempt": origin.attempt, "position": position, "tier": tier}
    return _Part(span, source)
