"""Copy the K/V of spans into private slots: all of them or nothing, on all ranks or on none."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from kvgraft.graft.executor import SpanCopy
from kvgraft.integrations.sglang.donors.texts import UNKNOWN, HostBlockKV, Origin, TreeKV
from kvgraft.reuse.together import FailedTogetherError
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
    from kvgraft.integrations.sglang.requests.request import SGLangRequest

_Result = TypeVar("_Result")


class _Part(NamedTuple):
    """Tokens of a span with the K/V of one request, and the source that reports name for them."""

    span: LoadSpan
    source: dict[str, object]


class _Found(NamedTuple):
    """The K/V of a span: how they are copied, and which requests had them."""

    copy: SpanCopy
    parts: list[_Part]


class _LackError(Exception):
    """Something that loading needs is not there on this rank; no defect."""

    def __init__(self, reason: MissReason, detail: str) -> None:
        super().__init__(detail)
        self.miss = Miss(reason, detail)


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

        Raises:
            FailedTogetherError: It failed on all ranks, and their trees may not be alike any more.
        """
        spans = state.take_due(position)
        pins: list[object] = []
        try:
            return self._load(state, spans, expected, pins)
        finally:
            self._unpin(pins)

    def _load(self, state: SGLangRequest, spans: list[LoadSpan], expected: int, pins: list[object]) -> Tensor | None:
        started = time.perf_counter()
        # Ranks that have pinned the same evict the same to make room.
        found = self._on_all(state, partial(self._find_all, spans, expected, pins))
        if found is None:
            return None
        held: list[Tensor] = []
        is_loaded = False
        try:
            # Where this fails, one rank may have evicted and another not: the caller makes trees alike again.
            self.ranks.together(partial(self._allocate, sum(each.copy.length for each in found), held))
            if not held:
                state.missed(Miss(MissReason.NO_ROOM, "prompt and donors do not fit into the pool together"))
                return None
            if self._on_all(state, partial(self._copy, state, found, held[0], started)) is None:
                return None
            # All ranks keep the slots, or none does: nothing may fail on one of them from here on.
            self.ranks.together(partial(self._used, spans, pins))
            is_loaded = True
        finally:
            if held and not is_loaded:
                self.tree.free(held[0])
                state.unload(spans[0].start)
        return held[0]

    def _on_all(self, state: SGLangRequest, act: Callable[[], _Result]) -> _Result | None:
        """Act on all ranks; where one of them fails or lacks something, it is noted, and None."""
        try:
            return self.ranks.together(act)
        except FailedTogetherError as error:
            if error.origin is error:
                state.missed(Miss(MissReason.ERROR, "tensor-parallel ranks disagree"))
                self.log.count_error()
            elif isinstance(error.origin, _LackError):
                state.missed(error.origin.miss)
            else:
                state.missed(self.log.failed("graft", state.rid, error))
            return None

    def _allocate(self, num_tokens: int, held: list[Tensor]) -> None:
        """Put new slots into `held`, if there are any."""
        slots = self.tree.allocate(num_tokens)
        if slots is not None:
            held.append(slots)

    def _copy(self, state: SGLangRequest, found: list[_Found], slots: Tensor, started: float) -> bool:
        """Copy what was found, and note it, with the time since `started`."""
        self.buffers.copy([each.copy for each in found], slots)
        parts = [part for each in found for part in each.parts]
        ms = 1e3 * (time.perf_counter() - started)
        state.loaded([part.span for part in parts], [part.source for part in parts], ms)
        return True

    def _used(self, spans: list[LoadSpan], pins: list[object]) -> None:
        for span in spans:
            assert span.donor is not None
            self.keeper.record_hit(span.donor, span.length)
        self._unpin(pins)

    def _unpin(self, pins: list[object]) -> None:
        while pins:
            self.tree.unpin(pins.pop())

    def _find_all(self, spans: list[LoadSpan], expected: int, pins: list[object]) -> list[_Found]:
        """Find the K/V of all spans; what the tree has of them is pinned."""
        if sum(span.length for span in spans) != expected:
            raise _LackError(MissReason.NO_ROOM, "running requests need the slots")
        all_found = [found for span in spans if (found := self._find(span, pins)) is not None]
        if len(all_found) < len(spans):
            raise _LackError(MissReason.NO_MATCH, "the donor was evicted before it could be copied")
        return all_found

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
