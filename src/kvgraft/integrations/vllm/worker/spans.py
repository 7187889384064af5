"""Spans that one graft copies from donors, and their parts in a range of the prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.graft.executor import BlockSource, RotatedSpans, SpanCopy

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    import torch

    from kvgraft.graft.rope import RopeSpec
    from kvgraft.memory.block import KVBlock
    from kvgraft.types import DonorId, Match

_EVERYTHING = 1 << 62


class DonorSpans:
    """Views of donors' K/V, valid as long as this object, even once the donors are evicted. Some may still have to arrive."""

    def __init__(
        self,
        read: Callable[[DonorId, int, int], KVBlock],
        spans: Sequence[Match],
        source_starts: Sequence[int],
        rope: Sequence[RopeSpec | None],
        device: torch.device,
        *,
        awaited: Collection[DonorId] = (),
    ) -> None:
        """View the K/V of all spans, ascending and disjoint, but for those of donors that are `awaited`.

        Args:
            read: Views tokens of a donor: its id, the first one, and how many.
            spans: What is copied.
            source_starts: Position where the K/V of each span were computed.
            rope: Rotation of keys, by layer.
            device: Where they go.
            awaited: Donors with K/V that have yet to arrive.

        Raises:
            StoreError: A donor is not there.
        """
        self._spans = list(zip(spans, source_starts, strict=True))
        self._blocks: list[KVBlock | None] = [
            None if span.donor_id in awaited else read(span.donor_id, span.donor_start, span.length) for span in spans
        ]
        self._rope = rope
        self._device = device

    @property
    def ready_end(self) -> int:
        """First position with K/V that have not arrived; a number beyond all positions if there is none."""
        pairs = zip(self._spans, self._blocks, strict=True)
        return next((span.target_start for (span, _), block in pairs if block is None), _EVERYTHING)

    @property
    def is_complete(self) -> bool:
        """Whether all K/V have arrived."""
        return self.ready_end == _EVERYTHING

    def arrive(self, index: int, block: KVBlock) -> None:
        """Take the K/V of a span that was awaited."""
        self._blocks[index] = block

    def between(self, start: int, stop: int) -> RotatedSpans | None:
        """Return the copies that lie in `[start, stop)`, all of which have arrived; None if there are none."""
        copies = []
        for (span, source_start), block in zip(self._spans, self._blocks, strict=True):
            first, last = max(start, span.target_start), min(stop, span.target_end)
            if first < last:
                assert block is not None, "K/V are asked for before their arrival"
                skipped = first - span.target_start
                source = BlockSource(block.span(skipped, last - first), self._device)
                copies.append(SpanCopy(source, source_start + skipped, first, last - first))
        return RotatedSpans(copies, self._rope, self._device) if copies else None
