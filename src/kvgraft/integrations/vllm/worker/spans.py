"""Reused K/V of one graft: donors' tokens, rotated to where the prompt has them, position by position."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from kvgraft.graft.rope import RopeShift, RopeSpec, rotate_keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from kvgraft.integrations.vllm.worker.donor_store import DonorStore
    from kvgraft.types import Match


class ReusedSpans:
    """Reads of donors, valid as long as the object lives whatever the store forgets."""

    def __init__(
        self, donors: DonorStore, spans: Sequence[Match], source_starts: Sequence[int], device: torch.device
    ) -> None:
        """View the K/V of all spans.

        Raises:
            StoreError: A donor is not there.
        """
        self._blocks = [donors.get(span.donor_id, span.donor_start, span.length) for span in spans]
        self.positions = _joined([np.arange(span.target_start, span.target_end) for span in spans])
        sources = _joined(
            [np.arange(start, start + span.length) for span, start in zip(spans, source_starts, strict=True)]
        )
        self._targets = torch.from_numpy(self.positions)
        self._sources = torch.from_numpy(sources)
        self._bounds = np.cumsum([0, *(span.length for span in spans)])
        self._device = device

    def between(self, start: int, stop: int) -> slice:
        """Which entries of `positions` lie in `[start, stop)`."""
        low, high = np.searchsorted(self.positions, [start, stop])
        return slice(int(low), int(high))

    def keys(self, layer: int, part: slice, shift: RopeShift | None, spec: RopeSpec | None) -> Tensor:
        """Keys `(num_tokens, num_kv_heads, head_dim)` of `part`, rotated."""
        keys = self._gather([block.keys[layer] for block in self._blocks], part)
        return keys if spec is None or shift is None else rotate_keys(keys, shift, spec.pairing)

    def values(self, layer: int, part: slice) -> Tensor:
        """Values `(num_tokens, num_kv_heads, head_dim)` of `part`."""
        return self._gather([block.values[layer] for block in self._blocks], part)

    def shift(self, part: slice, spec: RopeSpec | None) -> RopeShift | None:
        """The rotation of `part` under one frequency table; None where nothing moves."""
        sources, targets = self._sources[part], self._targets[part]
        if spec is None or torch.equal(sources, targets):
            return None
        return RopeShift.between(sources.to(self._device), targets.to(self._device), spec.inv_freq)

    def _gather(self, tensors: list[Tensor], part: slice) -> Tensor:
        pieces = []
        for number, tensor in enumerate(tensors):
            low, high = max(part.start, int(self._bounds[number])), min(part.stop, int(self._bounds[number + 1]))
            if low < high:
                pieces.append(tensor[low - int(self._bounds[number]) : high - int(self._bounds[number])])
        joined = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return joined.to(self._device, non_blocking=True)


def _joined(parts: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
