"""What one graft copies from donors, and the parts of it that lie in a range of the prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.graft.executor import BlockSource, RotatedSpans, SpanCopy

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvgraft.graft.rope import RopeSpec
    from kvgraft.integrations.vllm.worker.donor_store import DonorStore
    from kvgraft.types import Match


class DonorSpans:
    """Views of donors' K/V, good as long as the object lives, whatever the store forgets."""

    def __init__(
        self,
        donors: DonorStore,
        spans: Sequence[Match],
        source_starts: Sequence[int],
        rope: Sequence[RopeSpec | None],
        device: torch.device,
    ) -> None:
        """View the K/V of all spans, ascending and disjoint.

        Raises:
            StoreError: A donor is not there.
        """
        blocks = [donors.get(span.donor_id, span.donor_start, span.length) for span in spans]
        self._spans = list(zip(spans, source_starts, blocks, strict=True))
        self._rope = rope
        self._device = device

    def between(self, start: int, stop: int) -> RotatedSpans | None:
        """The copies that lie in `[start, stop)`; None if there are none."""
        copies = []
        for span, source_start, block in self._spans:
            first, last = max(start, span.target_start), min(stop, span.target_end)
            if first < last:
                skipped = first - span.target_start
                source = BlockSource(block.span(skipped, last - first), self._device)
                copies.append(SpanCopy(source, source_start + skipped, first, last - first))
        return RotatedSpans(copies, self._rope, self._device) if copies else None
