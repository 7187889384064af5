"""Attention of chosen rows over all slots of their sequence, under the causal mask by position.

Two shapes of work: long runs of neighbouring positions (a cold prefill, a chunk, a gap) go to PyTorch's fused attention;
rows scattered over the prompt (recomputed tokens, decode steps) are few, so their scores are formed block by block with
keys cut off behind the block's last position. Both honour sliding windows; soft-capped logits always take the second way
because no fused kernel of PyTorch offers them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

_MIN_RUN_ROWS = 96
"""Shorter runs are cheaper as scattered rows than as a fused call with a band mask."""
_MIN_RUN_PER_PADDING = 4
"""A run that begins at position p is padded to a causal square if it has this many times p rows."""
_RUN_BLOCK_ROWS = 256
"""Rows of a run that share one band mask; also the query block of PyTorch's CPU kernel."""
_MAX_CPU_BLOCK_SCORES = 1 << 19
"""Scores (heads x rows x keys) formed at once for scattered rows: 2 MiB of float32, which a CPU's cache holds."""
_MAX_BLOCK_SCORES = 1 << 26
"""The same on other devices, where only memory bounds it: 256 MiB."""
_MAX_BLOCK_ROWS = 512
"""Scattered rows in one block however few keys they see."""


@dataclass(frozen=True, slots=True, eq=False)
class RowBlock:
    """Rows `[start, stop)` of a sequence's query that attend together.

    Attributes:
        first: Position of the first row.
        last: Position of the last row.
        is_run: Whether the positions are consecutive and the block goes to the fused kernel.
    """

    start: int
    stop: int
    first: int
    last: int
    is_run: bool


def split_rows(positions: NDArray[np.int64], num_fused: int) -> list[RowBlock]:
    """Cut ascending `positions` into long runs (within the first `num_fused`) and stretches of scattered rows. O(rows)."""
    is_break = np.diff(positions) != 1
    if 0 < num_fused < len(positions):
        is_break[num_fused - 1] = True
    breaks = np.flatnonzero(is_break) + 1
    starts = [0, *breaks.tolist()]
    stops = [*breaks.tolist(), len(positions)]
    blocks: list[RowBlock] = []
    for start, stop in zip(starts, stops, strict=True):
        is_run = stop <= num_fused and stop - start >= _MIN_RUN_ROWS
        joins = blocks and not is_run and not blocks[-1].is_run
        begin = blocks.pop().start if joins else start
        blocks.append(RowBlock(begin, stop, int(positions[begin]), int(positions[stop - 1]), is_run))
    return blocks


@dataclass(frozen=True, slots=True, eq=False)
class LayerInputs:
    """What one layer hands to attention.

    Attributes:
        query: (num_heads, num_rows, head_dim).
        keys: (num_kv_heads, num_keys, head_dim), by position.
        values: Likewise.
        scale: Factor of the scores.
        window: Keys that a row sees, itself included; None for all.
        softcap: Bound of the scores, `softcap * tanh(score / softcap)`; None for none.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    scale: float
    window: int | None
    softcap: float | None


@dataclass(frozen=True, slots=True, eq=False)
class _ScatteredPart:
    """Rows that form their scores together, and which of the scores are hidden.

    Attributes:
        rows: Rows of the query.
        keys: Positions that at least one of them sees.
        first_masked: Index in `keys` from which on some rows see less than others.
        hidden: bool (num_rows, 1, keys behind `first_masked`).
    """

    rows: slice
    keys: slice
    first_masked: int
    hidden: Tensor


@dataclass(slots=True, eq=False)
class SequenceAttention:
    """Attention of one sequence's rows for every layer of one forward pass.

    Attributes:
        positions: int64 (num_rows,), ascending, on the CPU.
        observed_rows: How many of the last rows add to `mass`.
        mass: float32 (positions[-1] + 1,), filled while layers run.
    """

    positions: NDArray[np.int64]
    device: torch.device
    observed_rows: int = 0
    mass: Tensor | None = None
    _positions: Tensor = field(init=False)
    _blocks: dict[int, list[RowBlock]] = field(default_factory=dict)
    _parts: dict[tuple[int, int, int | None], list[_ScatteredPart]] = field(default_factory=dict)
    _bands: dict[int | None, Tensor] = field(default_factory=dict)
    _scratch: tuple[Tensor, Tensor] | None = None

    def __post_init__(self) -> None:
        self._positions = torch.from_numpy(self.positions).to(self.device)
        if self.observed_rows:
            self.mass = torch.zeros(self.num_keys, device=self.device)

    @property
    def num_keys(self) -> int:
        """Keys that any row may see: all positions up to the last row's."""
        return int(self.positions[-1]) + 1

    def attend(self, layer: LayerInputs) -> Tensor:
        """Return the rows' attention output, (num_heads, num_rows, head_dim)."""
        query = layer.query
        output = torch.empty(*query.shape[:2], layer.values.shape[-1], dtype=query.dtype, device=query.device)
        # Fused kernels do not give their weights away, so observed rows take the other way.
        num_fused = 0 if layer.softcap is not None else len(self.positions) - self.observed_rows
        if num_fused not in self._blocks:
            self._blocks[num_fused] = split_rows(self.positions, num_fused)
        for block in self._blocks[num_fused]:
            attend = self._attend_run if block.is_run else self._attend_scattered
            attend(block, layer, output)
        return output

    def _attend_run(self, run: RowBlock, layer: LayerInputs, output: Tensor) -> None:
        query = layer.query[:, run.start : run.stop]
        sees_all = layer.window is None or layer.window > run.last
        if sees_all and run.first * _MIN_RUN_PER_PADDING <= run.stop - run.start:
            # Empty rows in front make it a causal square, which the kernel handles faster than a mask.
            padded = F.pad(query, (0, 0, run.first, 0))
            output[:, run.start : run.stop] = _fused(padded, layer, slice(0, run.last + 1), None)[:, run.first :]
            return
        for start in range(run.start, run.stop, _RUN_BLOCK_ROWS):
            rows = slice(start, min(start + _RUN_BLOCK_ROWS, run.stop))
            keys = self._visible(rows, layer.window)
            shift = self.num_keys - int(self.positions[start])
            band = self._band(layer.window, layer.query.dtype)
            mask = band[: rows.stop - start, shift + keys.start : shift + keys.stop]
            output[:, rows] = _fused(layer.query[:, rows], layer, keys, mask)

    def _band(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive mask that, moved by a block's first position, is the causal (and window) mask of that block.

        Row i allows column c iff `c - num_keys <= i` and, with a window, `c - num_keys > i - window`.
        """
        if window not in self._bands:
            row = torch.arange(_RUN_BLOCK_ROWS, device=self.device)[:, None]
            column = torch.arange(self.num_keys + _RUN_BLOCK_ROWS, device=self.device)[None] - self.num_keys
            hidden = column > row
            if window is not None:
                hidden |= column <= row - window
            zeros = torch.zeros(hidden.shape, dtype=dtype, device=self.device)
            self._bands[window] = zeros.masked_fill_(hidden, -math.inf)
        return self._bands[window]

    def _attend_scattered(self, block: RowBlock, layer: LayerInputs, output: Tensor) -> None:
        num_heads, head_dim = len(layer.query), layer.query.shape[-1]
        num_kv_heads = len(layer.keys)
        group = num_heads // num_kv_heads
        # Heads that share keys lie side by side per row, so that any stretch of rows is one matrix without a copy.
        scaled = layer.query[:, block.start : block.stop] * layer.scale
        query = scaled.view(num_kv_heads, group, -1, head_dim).transpose(1, 2).contiguous()
        mixed = torch.empty_like(query)
        for part in self._scattered_parts(block, num_heads, layer.window):
            rows = slice(part.rows.start - block.start, part.rows.stop - block.start)
            weights = self._weights(query[:, rows].flatten(1, 2), layer, part, group)
            values = torch.bmm(weights.to(layer.values.dtype), layer.values[:, part.keys])
            mixed[:, rows] = values.view(num_kv_heads, -1, group, head_dim)
            self._observe(weights, part, group)
        output[:, block.start : block.stop] = mixed.transpose(1, 2).reshape(num_heads, -1, head_dim)

    def _scattered_parts(self, block: RowBlock, num_heads: int, window: int | None) -> list[_ScatteredPart]:
        """Cut `block` so that each part forms a bounded number of scores, or is one row; the same in every layer."""
        place = block.start, block.stop, window
        if place not in self._parts:
            self._parts[place] = [self._scattered_part(rows, window) for rows in self._small_blocks(block, num_heads)]
        return self._parts[place]

    def _small_blocks(self, block: RowBlock, num_heads: int) -> Iterator[slice]:
        limit = _MAX_CPU_BLOCK_SCORES if self.device.type == "cpu" else _MAX_BLOCK_SCORES
        start = block.start
        while start < block.stop:
            positions = self.positions[start : min(block.stop, start + _MAX_BLOCK_ROWS)]
            scores = num_heads * np.arange(1, len(positions) + 1) * (positions + 1)
            stop = start + max(1, int(np.searchsorted(scores, limit, side="right")))
            yield slice(start, stop)
            start = stop

    def _scattered_part(self, rows: slice, window: int | None) -> _ScatteredPart:
        keys = self._visible(rows, window)
        positions = self._positions[rows, None]
        # Keys in front of the first row are seen by all rows, unless a window hides them.
        masked = slice(int(self.positions[rows.start]) + 1 if window is None else keys.start, keys.stop)
        columns = torch.arange(masked.start, masked.stop, device=self.device)
        hidden = columns > positions
        if window is not None:
            hidden |= columns <= positions - window
        return _ScatteredPart(rows, keys, masked.start - keys.start, hidden[:, None])

    def _visible(self, rows: slice, window: int | None) -> slice:
        """Positions that at least one of `rows` sees."""
        low = 0 if window is None else max(0, int(self.positions[rows.start]) - window + 1)
        return slice(low, int(self.positions[rows.stop - 1]) + 1)

    def _weights(self, query: Tensor, layer: LayerInputs, part: _ScatteredPart, group: int) -> Tensor:
        """Softmax weights of scaled queries (num_kv_heads, rows * group, head_dim), float32 over the keys of `part`.

        The next call overwrites them.
        """
        keys = layer.keys[:, part.keys].transpose(1, 2)
        shape = (len(query), query.shape[1], keys.shape[2])
        scores, weights = (buffer[: math.prod(shape)].view(shape) for buffer in self._buffers(math.prod(shape)))
        if query.dtype == torch.float32:
            torch.bmm(query, keys, out=scores)
        else:
            scores.copy_(torch.bmm(query, keys))
        if layer.softcap is not None:
            scores.div_(layer.softcap).tanh_().mul_(layer.softcap)
        if part.hidden.shape[-1]:
            by_row = scores.view(len(scores), -1, group, scores.shape[-1])
            by_row[..., part.first_masked :].masked_fill_(part.hidden, -math.inf)
        return torch.softmax(scores, dim=-1, out=weights)

    def _buffers(self, size: int) -> tuple[Tensor, Tensor]:
        """Two float32 buffers of at least `size`, kept for the whole pass: fresh memory costs page faults every time."""
        if self._scratch is None or len(self._scratch[0]) < size:
            self._scratch = (torch.empty(size, device=self.device), torch.empty(size, device=self.device))
        return self._scratch

    def _observe(self, weights: Tensor, part: _ScatteredPart, group: int) -> None:
        """Add the attention of those rows of `part` that are observed."""
        first = max(part.rows.start, len(self.positions) - self.observed_rows)
        if self.mass is not None and first < part.rows.stop:
            observed = weights[:, (first - part.rows.start) * group :]
            self.mass[part.keys] += observed.sum(dim=(0, 1))


def _fused(query: Tensor, layer: LayerInputs, keys: slice, mask: Tensor | None) -> Tensor:
    """PyTorch's attention of `query` over `keys`; causal from the first key where there is no mask."""
    return F.scaled_dot_product_attention(
        query[None],
        layer.keys[None, :, keys],
        layer.values[None, :, keys],
        attn_mask=mask,
        is_causal=mask is None,
        scale=layer.scale,
        enable_gqa=len(query) != len(layer.keys),
    )[0]
