"""Attention of chosen rows over all slots of their sequence, under the causal mask by position.

Two shapes of work: long runs of neighbouring positions (a cold prefill, a chunk, a gap) go to PyTorch's fused attention;
rows scattered over the prompt (recomputed tokens, decode steps) are few, so their scores are formed block by block with
keys cut off behind the block's last position. Both honour sliding windows; soft-capped logits always take the second way
because no fused kernel of PyTorch offers them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

_MIN_RUN_ROWS = 96
"""Shorter runs are cheaper as scattered rows than as a fused call with a band mask."""
_RUN_BLOCK_ROWS = 256
"""Rows of a run that share one band mask; also the query block of PyTorch's CPU kernel."""
_MAX_BLOCK_SCORES = 1 << 20
"""Scores (heads x rows x keys) formed at once for scattered rows: 4 MiB in float32, about a core's share of L3."""


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
    """Cut ascending `positions` into long runs, within the first `num_fused`, and stretches of scattered rows. O(num_rows)."""
    is_break = np.diff(positions) != 1
    if 0 < num_fused < len(positions):
        is_break[num_fused - 1] = True
    breaks = np.flatnonzero(is_break) + 1
    starts = [0, *breaks.tolist()]
    stops = [*breaks.tolist(), len(positions)]
    blocks: list[RowBlock] = []
    for start, stop in zip(starts, stops, strict=True):
        is_run = stop <= num_fused and stop - start >= _MIN_RUN_ROWS
        if blocks and not is_run and not blocks[-1].is_run:
            start = blocks.pop().start  # noqa: PLW2901 - scattered neighbours form one stretch
        blocks.append(RowBlock(start, stop, int(positions[start]), int(positions[stop - 1]), is_run))
    return blocks


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
    _bands: dict[int | None, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._positions = torch.from_numpy(self.positions).to(self.device)
        if self.observed_rows:
            self.mass = torch.zeros(self.num_keys, device=self.device)

    @property
    def num_keys(self) -> int:
        """Keys that any row may see: all positions up to the last row's."""
        return int(self.positions[-1]) + 1

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, *, scale: float, window: int | None, softcap: float | None) -> Tensor:
        """Return (num_heads, num_rows, head_dim) for `query` of that shape; `keys`, `values` are (num_kv_heads, num_keys, head_dim)."""
        if window is not None and window >= self.num_keys:
            window = None
        output = torch.empty(*query.shape[:2], values.shape[-1], dtype=query.dtype, device=query.device)
        # Fused kernels do not give their weights away, so observed rows take the other way.
        num_fused = 0 if softcap is not None else len(self.positions) - self.observed_rows
        if num_fused not in self._blocks:
            self._blocks[num_fused] = split_rows(self.positions, num_fused)
        for block in self._blocks[num_fused]:
            if block.is_run:
                self._attend_run(block, query, keys, values, output, scale, window)
            else:
                self._attend_scattered(block, query, keys, values, output, scale, window, softcap)
        return output

    def _attend_run(self, run: RowBlock, query: Tensor, keys: Tensor, values: Tensor, output: Tensor, scale: float, window: int | None) -> None:
        grouped = query.shape[0] != keys.shape[0]
        if run.first == 0 and window is None:
            stop = run.last + 1
            output[:, run.start : run.stop] = F.scaled_dot_product_attention(
                query[None, :, run.start : run.stop],
                keys[None, :, :stop],
                values[None, :, :stop],
                is_causal=True,
                scale=scale,
                enable_gqa=grouped,
            )[0]
            return
        for start in range(run.start, run.stop, _RUN_BLOCK_ROWS):
            stop = min(start + _RUN_BLOCK_ROWS, run.stop)
            first = run.first + start - run.start
            low = 0 if window is None else max(0, first - window + 1)
            high = first + stop - start
            output[:, start:stop] = F.scaled_dot_product_attention(
                query[None, :, start:stop],
                keys[None, :, low:high],
                values[None, :, low:high],
                attn_mask=self._band(window, query.dtype)[: stop - start, self.num_keys - first + low : self.num_keys - first + high],
                scale=scale,
                enable_gqa=grouped,
            )[0]

    def _band(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive mask whose columns, shifted by a block's first position, are the causal (and window) mask of that block.

        Row i allows column c iff `c - num_keys <= i` and, with a window, `c - num_keys > i - window`.
        """
        if window not in self._bands:
            row = torch.arange(_RUN_BLOCK_ROWS, device=self.device)[:, None]
            column = torch.arange(self.num_keys + _RUN_BLOCK_ROWS, device=self.device)[None] - self.num_keys
            hidden = column > row
            if window is not None:
                hidden |= column <= row - window
            self._bands[window] = torch.zeros(hidden.shape, dtype=dtype, device=self.device).masked_fill_(hidden, -math.inf)
        return self._bands[window]

    def _attend_scattered(
        self, block: RowBlock, query: Tensor, keys: Tensor, values: Tensor, output: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> None:
        for start, stop in self._small_blocks(block, query.shape[0]):
            low, high = self._key_range(start, stop, window)
            weights = self._weights(query, keys, start, stop, low, high, scale, window, softcap)
            mixed = torch.bmm(weights.to(values.dtype), values[:, low:high])
            output[:, start:stop] = mixed.view(query.shape[0], stop - start, -1)
            self._observe(weights, start, stop, low, high)

    def _small_blocks(self, block: RowBlock, num_heads: int) -> Iterator[tuple[int, int]]:
        rows = max(1, _MAX_BLOCK_SCORES // (num_heads * (block.last + 1)))
        for start in range(block.start, block.stop, rows):
            yield start, min(start + rows, block.stop)

    def _key_range(self, start: int, stop: int, window: int | None) -> tuple[int, int]:
        low = 0 if window is None else max(0, int(self.positions[start]) - window + 1)
        return low, int(self.positions[stop - 1]) + 1

    def _weights(
        self, query: Tensor, keys: Tensor, start: int, stop: int, low: int, high: int, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """Softmax weights, float32 (num_kv_heads, group * rows, high - low)."""
        num_kv_heads = keys.shape[0]
        rows = (query[:, start:stop] * scale).reshape(num_kv_heads, -1, query.shape[-1])
        scores = torch.bmm(rows, keys[:, low:high].transpose(1, 2)).float()
        if softcap is not None:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        positions = self._positions[start:stop, None]
        by_row = scores.view(num_kv_heads, -1, stop - start, high - low)
        first = int(self.positions[start])
        behind = torch.arange(first, high, device=self.device) > positions
        by_row[..., first - low :].masked_fill_(behind, -math.inf)
        if window is not None:
            outside = torch.arange(low, high, device=self.device) <= positions - window
            by_row.masked_fill_(outside, -math.inf)
        return torch.softmax(scores, dim=-1)

    def _observe(self, weights: Tensor, start: int, stop: int, low: int, high: int) -> None:
        """Add the attention of those rows in `[start, stop)` that are observed."""
        first = max(start, len(self.positions) - self.observed_rows)
        if self.mass is not None and first < stop:
            by_row = weights.view(weights.shape[0], -1, stop - start, high - low)
            self.mass[low:high] += by_row[:, :, first - start :].sum(dim=(0, 1, 2))
