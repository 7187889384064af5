"""The portable backend: PyTorch's fused attention and batched matrix products, sequence by sequence, on any device."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvgraft.engine.attention.sequence import LayerInputs, SequenceAttention
from kvgraft.graft.sinks import kept_share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvgraft.engine.attention.base import LayerQuery
    from kvgraft.graft.model import SequenceRows
    from kvgraft.memory.pool import SlotIndex, SlotPool
    from kvgraft.windows import WindowKind

_MIN_RUN_SLOTS = 128
"""Runs of slots shorter than this on average are cheaper to gather than to read one by one; two runs never are."""


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
        single_slots: list[NDArray[np.int64]] = []
        start = 0
        for rows in batch:
            stop = start + len(rows.positions)
            slots = rows.kv_indices[: int(rows.positions[-1]) + 1]
            attention = None
            if stop - start == 1 and not rows.observed_rows:
                single_rows.append(start)
                single_slots.append(slots)
            else:
                attention = SequenceAttention(rows.positions, pool.device, rows.observed_rows)
                self._parts.append(_Part(slice(start, stop), pool.index(slots), attention))
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
                query.sinks,
            )
            output[:, part.rows] = part.attention.attend(inputs)
        return output


class SingleRows:
    """Sequences with one row each: decode steps. No mask is needed, because the row is after all keys it is given.

    Slots in a few runs, such as a shared prefix and the request's own, are read where they lie; gathering them would copy all
    K/V of the sequence in every step.
    """

    def __init__(self, rows: list[int], slots: list[NDArray[np.int64]], pool: SlotPool) -> None:
        consecutive = rows[-1] - rows[0] == len(rows) - 1
        self._rows: slice | Tensor = (
            slice(rows[0], rows[-1] + 1) if consecutive else torch.tensor(rows, device=pool.device)
        )
        self._slots = slots
        self._pool = pool
        self._runs: dict[WindowKind | None, list[list[SlotIndex]]] = {}

    def attend(self, layer: LayerQuery, keys: Tensor, values: Tensor, output: Tensor) -> None:
        """Write the rows' attention over keys and values (num_kv_heads, num_slots, head_dim) into `output`."""
        num_heads, _, head_dim = layer.query.shape
        num_kv_heads = len(keys)
        # Rows outermost, so that each row's queries are one matrix per K/V head without a copy.
        query = (layer.query[:, self._rows] * layer.scale).view(num_kv_heads, num_heads // num_kv_heads, -1, head_dim)
        by_row = query.permute(2, 0, 1, 3).contiguous()
        mixed = torch.empty_like(by_row)
        for row_query, row_mixed, runs in zip(by_row.unbind(0), mixed.unbind(0), self._seen(layer.window), strict=True):
            scores = [torch.bmm(row_query, keys[:, run].transpose(1, 2)) for run in runs]
            weights = _softmax(scores, layer, values.dtype)
            torch.bmm(weights[0], values[:, runs[0]], out=row_mixed)
            for weight, run in zip(weights[1:], runs[1:], strict=True):
                row_mixed.baddbmm_(weight, values[:, run])
        output[:, self._rows] = mixed.permute(1, 2, 0, 3).reshape(num_heads, -1, head_dim)

    def _seen(self, window: WindowKind | None) -> list[list[SlotIndex]]:
        """Per row the slots that it sees, in runs; the same in every layer with this window."""
        if window not in self._runs:
            first = [0 if window is None else max(0, window.first_key(len(slots) - 1)) for slots in self._slots]
            seen = zip(self._slots, first, strict=True)
            self._runs[window] = [slot_runs(slots[start:], self._pool) for slots, start in seen]
        return self._runs[window]


def slot_runs(slots: NDArray[np.int64], pool: SlotPool) -> list[SlotIndex]:
    """Cut `slots` into ascending runs; one gathering index if they would be short. O(len(slots))."""
    breaks = np.flatnonzero(np.diff(slots) != 1) + 1
    if len(breaks) >= max(2, len(slots) // _MIN_RUN_SLOTS):
        return [pool.index(slots)]
    edges = [0, *breaks.tolist(), len(slots)]
    return [slice(int(slots[a]), int(slots[b - 1]) + 1) for a, b in itertools.pairwise(edges)]


def _softmax(scores: list[Tensor], layer: LayerQuery, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Weights of the runs' scores, normalised over all of them and the sink, in float32 and then `dtype`."""
    joined = (scores[0] if len(scores) == 1 else torch.cat(scores, dim=-1)).float()
    if layer.softcap is not None:
        joined = joined.div_(layer.softcap).tanh_().mul_(layer.softcap)
    weights = torch.softmax(joined, dim=-1)
    if layer.sinks is not None:
        weights *= kept_share(joined.logsumexp(-1), layer.sinks.view(joined.shape[:2]))[..., None]
    weights = weights.to(dtype)
    return (weights,) if len(scores) == 1 else weights.split([part.shape[-1] for part in scores], dim=-1)
