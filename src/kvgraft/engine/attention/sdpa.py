"""The portable backend: PyTorch's fused attention and batched matrix products, sequence by sequence, on any device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvgraft.engine.attention.sequence import LayerInputs, SequenceAttention

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgraft.engine.attention.base import LayerQuery
    from kvgraft.graft.model import SequenceRows
    from kvgraft.memory.pool import SlotIndex, SlotPool


class SdpaBackend:
    """Runs everywhere. Decode rows share their preparation; other rows go through `SequenceAttention`."""

    name = "sdpa"

    def plan(self, batch: Sequence[SequenceRows], pool: SlotPool) -> SdpaBatch:
        """Lay out `batch`. O(rows + keys)."""
        return SdpaBatch(batch, pool)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """One sequence of the batch: its rows, its slots up to its last row and its attention."""

    rows: slice
    slots: SlotIndex
    attention: SequenceAttention


class SdpaBatch:
    """One forward pass of `SdpaBackend`."""

    def __init__(self, batch: Sequence[SequenceRows], pool: SlotPool) -> None:
        self._pool = pool
        self._parts: list[_Part] = []
        self._sequences: list[SequenceAttention | None] = []
        single_rows: list[int] = []
        single_slots: list[SlotIndex] = []
        start = 0
        for rows in batch:
            stop = start + len(rows.positions)
            slots = pool.index(rows.kv_indices[: int(rows.positions[-1]) + 1])
            attention = None
            if stop - start == 1 and not rows.observed_rows:
                single_rows.append(start)
                single_slots.append(slots)
            else:
                attention = SequenceAttention(rows.positions, pool.device, rows.observed_rows)
                self._parts.append(_Part(slice(start, stop), slots, attention))
            self._sequences.append(attention)
            start = stop
        self._num_rows = start
        self._singles = SingleRows(single_rows, single_slots, pool) if single_rows else None

    @property
    def masses(self) -> list[Tensor | None]:
        """See `BatchAttention`."""
        return [None if attention is None else attention.mass for attention in self._sequences]

    def attend(self, layer: int, query: LayerQuery) -> Tensor:
        """See `BatchAttention`."""
        keys, values = self._pool.keys(layer).transpose(0, 1), self._pool.values(layer).transpose(0, 1)
        num_heads, _, head_dim = query.query.shape
        output = query.query.new_empty(num_heads, self._num_rows, head_dim)
        if self._singles is not None:
            self._singles.attend(query, keys, values, output)
        for part in self._parts:
            inputs = LayerInputs(
                query.query[:, part.rows],
                keys[:, part.slots],
                values[:, part.slots],
                query.scale,
                query.window,
                query.softcap,
            )
            output[:, part.rows] = part.attention.attend(inputs)
        return output


class SingleRows:
    """Sequences with one row each: decode steps. No mask is needed, because the row is behind all keys it is given."""

    def __init__(self, rows: list[int], slots: list[SlotIndex], pool: SlotPool) -> None:
        consecutive = rows[-1] - rows[0] == len(rows) - 1
        self._rows: slice | Tensor = (
            slice(rows[0], rows[-1] + 1) if consecutive else torch.tensor(rows, device=pool.device)
        )
        self._slots = slots

    def attend(self, layer: LayerQuery, keys: Tensor, values: Tensor, output: Tensor) -> None:
        """Write the rows' attention over keys and values (num_kv_heads, num_slots, head_dim) into `output`."""
        num_heads, _, head_dim = layer.query.shape
        num_kv_heads = len(keys)
        # Rows outermost, so that each row's queries are one matrix per K/V head without a copy.
        query = (layer.query[:, self._rows] * layer.scale).view(num_kv_heads, num_heads // num_kv_heads, -1, head_dim)
        by_row = query.permute(2, 0, 1, 3).contiguous()
        mixed = torch.empty_like(by_row)
        for row_query, row_mixed, slots in zip(by_row.unbind(0), mixed.unbind(0), self._slots, strict=True):
            seen = slots if layer.window is None else slots_seen(slots, layer.window)
            scores = torch.bmm(row_query, keys[:, seen].transpose(1, 2)).float()
            if layer.softcap is not None:
                scores = scores.div_(layer.softcap).tanh_().mul_(layer.softcap)
            weights = torch.softmax(scores, dim=-1).to(values.dtype)
            torch.bmm(weights, values[:, seen], out=row_mixed)
        output[:, self._rows] = mixed.permute(1, 2, 0, 3).reshape(num_heads, -1, head_dim)


def slots_seen(slots: SlotIndex, window: int) -> SlotIndex:
    """The last `window` of a sequence's slots."""
    if isinstance(slots, slice):
        return slice(max(slots.start, slots.stop - window), slots.stop)
    return slots[-window:]
