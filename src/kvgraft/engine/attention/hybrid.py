"""Attention of a hybrid model: full layers read one space of slots, window layers the other, with any backend.

A window layer needs the keys from the first row's first key to the last row only. Its rows are given to the backend as a
sequence that begins there, so that backends know nothing of spaces, and a slot that was given back is never even looked up.
A sequence that begins at the border of a chunk has its chunks where they were.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvgraft.errors import CorruptCacheError
from kvgraft.graft.model import SequenceRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvgraft.engine.attention.base import AttentionBackend, BatchAttention, LayerQuery
    from kvgraft.memory.hybrid_pool import HybridSlotPool
    from kvgraft.windows import WindowKind


class HybridBatch:
    """One forward pass over a `HybridSlotPool`: a layout of the batch per kind of layer."""

    def __init__(self, batch: Sequence[SequenceRows], pool: HybridSlotPool, backend: AttentionBackend) -> None:
        self._pool = pool
        self._device = pool.device
        self._num_keys = [int(rows.positions[-1]) + 1 for rows in batch]
        self._starts = [window_start(rows, pool.window_kind) for rows in batch]
        windowed = [windowed_rows(rows, start) for rows, start in zip(batch, self._starts, strict=True)]
        self._window: BatchAttention = backend.plan(windowed, pool.window)
        self._full = None if pool.full is None else backend.plan(batch, pool.full)

    @property
    def masses(self) -> list[Tensor | None]:
        """See `BatchAttention`."""
        masses: list[Tensor | None] = []
        full = [None] * len(self._starts) if self._full is None else self._full.masses
        for everywhere, within, start, num_keys in zip(
            full, self._window.masses, self._starts, self._num_keys, strict=True
        ):
            if within is None:
                masses.append(None)
                continue
            mass = torch.zeros(num_keys, device=self._device) if everywhere is None else everywhere.clone()
            mass[start:] += within
            masses.append(mass)
        return masses

    def attend(self, layer: int, query: LayerQuery) -> Tensor:
        """See `BatchAttention`."""
        pool, number = self._pool.pool_of(layer)
        attention = self._window if pool is self._pool.window or self._full is None else self._full
        return attention.attend(number, query)


def window_start(rows: SequenceRows, window: WindowKind) -> int:
    """Lowest position that a window layer reads for `rows`."""
    return max(0, window.first_key(int(rows.positions[0])))


def windowed_rows(rows: SequenceRows, start: int) -> SequenceRows:
    """The same rows of the sequence that begins at `start`, in slots of the window space.

    Raises:
        CorruptCacheError: A slot that is to be read was given back, or there never was one.
    """
    if rows.swa_indices is None:
        raise CorruptCacheError("rows of a hybrid model came without slots of their window layers")
    slots = rows.swa_indices[start : int(rows.positions[-1]) + 1]
    if len(slots) and slots.min() < 0:
        raise CorruptCacheError(f"a window layer was to read a freed slot after position {start}")
    return SequenceRows(
        rows.token_ids, rows.positions - start, slots, num_logits=rows.num_logits, observed_rows=rows.observed_rows
    )
