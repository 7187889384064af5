"""What one graft copies from donors, and the parts of it that lie in a range of the prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.graft.executor import BlockSource, RotatedSpans, SpanCopy

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import torch

    from kvgraft.graft.rope import RopeSpec
    from kvgraft.integrations.vllm.worker.donor_store import DonorStore
    from kvgraft.memory.block import KVBlock
    from kvgraft.types import DonorId, Match

_EVERYTHING = 1 << 62


class DonorSpans:
    """Views of donors' K/V, good as long as the object lives, whatever the store forgets. Some may still be on their way."""

    def __init__(
        self,
        donors: DonorStore,
        spans: Sequence[Match],
        source_starts: Sequence[int],
        rope: Sequence[RopeSpec | None],
        device: torch.device,
        *,
        awaited: Collection[DonorId] = (),
    ) -> None:
        """View the K/V of all spans, ascending and disjoint, but for those of donors that are `awaited`.

        Raises:
            StoreError: A donor is not there.
        """
        self._spans = list(zip(spans, source_starts, strict=True))
        self._blocks: list[KVBlock | None] = [
            None if span.donor_id in awaited else donors.get(span.donor_id, span.donor_start, span.length)
            for span in spans
        ]
        self._rope = rope
        self._device = device

    @property
    def ready_end(self) -> int:
        """First position whose K/V are on their way; a number beyond all positions if none are."""
        missing = (
            span.target_start for (span, _), block in zip(self._spans, self._blocks, strict=True) if block is None
        )
        return next(missing, _EVERYTHING)

    @property
    def is_complete(self) -> bool:
        """Whether nothing is on its way."""
        return self.ready_end == _EVERYTHING

    def arrive(self, index: int, block: KVBlock) -> None:
        """Take the K/V of a span that was awaited."""
        self._blocks[index] = block

    def between(self, start: int, stop: int) -> RotatedSpans | None:
        """The copies that lie in `[start, stop)`, all of which are here; None if there are none."""
        copies = []
        for (span, source_start), block in zip(self._spans, self._blocks, strict=True):
            first, last = max(start, span.target_start), min(stop, span.target_end)
            if first < last:
                assert block is not None, "K/V are asked for in front of their arrival"
                skipped = first - span.target_start
                source = BlockSource(block.span(skipped, last - first), self._device)
                copies.append(SpanCopy(source, source_start + skipped, first, last - first))
        return RotatedSpans(copies, self._rope, self._device) if copies else None
