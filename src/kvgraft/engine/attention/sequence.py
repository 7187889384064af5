"""Attention of chosen rows over all slots of their sequence, under the causal mask by position.

Three shapes of work: long runs of neighbouring positions (a cold prefill, a chunk, a gap) go to PyTorch's fused attention
with one mask that moves along; rows scattered over the prompt (recomputed tokens) go there too, a few at a time, each block
with a mask of its own and keys cut off after its last position; of single rows (decode steps) and of those with weights
that are asked for the scores are formed here. All honour windows; soft-capped logits and attention sinks always take the last
way because no fused kernel of PyTorch offers them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvgraft.graft.sinks import kept_share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from kvgraft.windows import WindowKind

_MIN_RUN_ROWS = 96
"""Shorter runs are cheaper as scattered rows than as a fused call with a band mask."""
_MIN_RUN_PER_PADDING = 4
"""A run that begins at position p is padded to a causal square if it has this many times p rows."""
_RUN_BLOCK_ROWS = 256
"""Rows of a run that share one band mask; also the query block of PyTorch's CPU kernel."""
_MASKED_ROWS = 64
"""Scattered rows that share one mask: 1.4-1.7 times faster than scores formed here, and more rows see more keys in vain."""
_MAX_KEPT_MASKS = 1 << 24
"""Numbers in masks that are kept for all layers, 64 MiB of float32; what is more is formed for each layer."""
_MIN_MASKED_ROWS = 16
"""Fewer rows gain nothing."""
_MAX_CPU_BLOCK_SCORES = 1 << 19
"""Scores (heads x rows x keys) formed at once for scattered rows: 2 MiB of float32, which a CPU's cache holds."""
_MAX_BLOCK_SCORES = 1 << 26
"""The same on other devices, where only memory bounds it: 256 MiB."""
_MAX_BLOCK_ROWS = 512
"""Scattered rows in one block however few keys they see."""
ACCELERATOR_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Without cuDNN's, which plans anew for every length, and here every step has another one."""


@dataclass(frozen=True, slots=True, eq=False)
class RowBlock:
    """Rows `[start, stop)` of a sequence's query that attend together.

    Attributes:
        first: Position of the first row.
        last: Position of the last row.
        is_run: Whether the positions are consecutive and share a mask that moves along.
        is_fused: Whether the block may go to a fused kernel; a run always does.
    """

    start: int
    stop: int
    first: int
    last: int
    is_run: bool
    is_fused: bool


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
        is_fused = stop <= num_fused
        is_run = is_fused and stop - start >= _MIN_RUN_ROWS
        joins = blocks and not is_run and not blocks[-1].is_run and blocks[-1].is_fused == is_fused
        begin = blocks.pop().start if joins else start
        blocks.append(RowBlock(begin, stop, int(positions[begin]), int(positions[stop - 1]), is_run, is_fused))
    return blocks


@dataclass(frozen=True, slots=True, eq=False)
class LayerInputs:
    """Arguments of one layer's attention.

    Attributes:
        query: (num_heads, num_rows, head_dim).
        keys: (num_kv_heads, num_keys, head_dim), by position.
        values: Likewise.
        scale: Factor of the scores.
        window: Which keys a row sees; None for all up to its own.
        softcap: Bound of the scores, `softcap * tanh(score / softcap)`; None for none.
        sinks: (num_heads,), per head the score of one more key with the value 0; None for none.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    scale: float
    window: WindowKind | None
    softcap: float | None
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _ScatteredPart:
    """Rows that form their scores together, and which of the scores are hidden.

    Attributes:
        rows: Rows of the query.
        keys: Positions that at least one of them sees.
        first_masked: Index in `keys` from which on some rows see less than others.
        hidden: bool (num_rows, 1, keys from `first_masked` on).
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
    _parts: dict[tuple[int, int, WindowKind | None], list[_ScatteredPart]] = field(default_factory=dict)
    _masks: dict[tuple[int, int, WindowKind | None], Tensor] = field(default_factory=dict)
    _mask_room: int = field(default_factory=lambda: _MAX_KEPT_MASKS)
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
        is_fused = layer.softcap is None and layer.sinks is None
        num_fused = len(self.positions) - self.observed_rows if is_fused else 0
        if num_fused not in self._blocks:
            self._blocks[num_fused] = split_rows(self.positions, num_fused)
        for block in self._blocks[num_fused]:
            self._way(block)(block, layer, output)
        return output

    def _way(self, block: RowBlock) -> Callable[[RowBlock, LayerInputs, Tensor], None]:
        if block.is_run:
            return self._attend_run
        if block.is_fused and block.stop - block.start >= _MIN_MASKED_ROWS:
            return self._attend_masked
        return self._attend_scattered

    def _attend_run(self, run: RowBlock, layer: LayerInputs, output: Tensor) -> None:
        for rows in self._stretches(run, layer.window):
            self._attend_stretch(rows, layer, output)

    def _stretches(self, run: RowBlock, window: WindowKind | None) -> Iterator[slice]:
        """Cut `run` where the masks of its rows stop being one band, moved along."""
        start = run.start
        while start < run.stop:
            position = int(self.positions[start])
            num_rows = run.stop - start if window is None else window.stretch_end(position) - position
            stop = min(run.stop, start + num_rows)
            yield slice(start, stop)
            start = stop

    def _attend_stretch(self, rows: slice, layer: LayerInputs, output: Tensor) -> None:
        keys = self._visible(rows, layer.window)
        num_front = int(self.positions[rows.start]) - keys.start
        sees_all = layer.window is None or max(0, layer.window.first_key(keys.stop - 1)) == keys.start
        if sees_all and num_front * _MIN_RUN_PER_PADDING <= rows.stop - rows.start:
            # Empty rows in front make it a causal square, which the kernel handles faster than a mask.
            padded = F.pad(layer.query[:, rows], (0, 0, num_front, 0))
            output[:, rows] = _fused(padded, layer, keys, None)[:, num_front:]
            return
        for start in range(rows.start, rows.stop, _RUN_BLOCK_ROWS):
            block = slice(start, min(start + _RUN_BLOCK_ROWS, rows.stop))
            output[:, block] = self._attend_block(block, layer)

    def _attend_block(self, rows: slice, layer: LayerInputs) -> Tensor:
        keys = self._visible(rows, layer.window)
        shift = self.num_keys - int(self.positions[rows.start])
        band = self._band(None if layer.window is None else layer.window.band, layer.query.dtype)
        mask = band[: rows.stop - rows.start, shift + keys.start : shift + keys.stop]
        return _fused(layer.query[:, rows], layer, keys, mask)

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

    def _attend_masked(self, block: RowBlock, layer: LayerInputs, output: Tensor) -> None:
        for start in range(block.start, block.stop, _MASKED_ROWS):
            rows = slice(start, min(start + _MASKED_ROWS, block.stop))
            keys = self._visible(rows, layer.window)
            output[:, rows] = _fused(layer.query[:, rows], layer, keys, self._mask(rows, keys, layer))

    def _mask(self, rows: slice, keys: slice, layer: LayerInputs) -> Tensor:
        """The additive mask (num_rows, num_keys) that says which row sees which key; kept for all layers if it is small."""
        place = rows.start, rows.stop, layer.window
        known = self._masks.get(place)
        if known is None:
            known = self._formed_mask(rows, keys, layer)
            if known.numel() <= self._mask_room:
                self._mask_room -= known.numel()
                self._masks[place] = known
        return known

    def _formed_mask(self, rows: slice, keys: slice, layer: LayerInputs) -> Tensor:
        hidden = self._hidden(rows, keys, layer.window)
        zeros = torch.zeros(hidden.shape, dtype=layer.query.dtype, device=self.device)
        return zeros.masked_fill_(hidden, -math.inf)

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

    def _scattered_parts(self, block: RowBlock, num_heads: int, window: WindowKind | None) -> list[_ScatteredPart]:
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

    def _scattered_part(self, rows: slice, window: WindowKind | None) -> _ScatteredPart:
        keys = self._visible(rows, window)
        # Keys before the first row are seen by all rows, unless a window hides them.
        masked = slice(int(self.positions[rows.start]) + 1 if window is None else keys.start, keys.stop)
        return _ScatteredPart(rows, keys, masked.start - keys.start, self._hidden(rows, masked, window)[:, None])

    def _hidden(self, rows: slice, keys: slice, window: WindowKind | None) -> Tensor:
        """Return which of the rows does not see which of the keys: bool (num_rows, num_keys)."""
        columns, positions = torch.arange(keys.start, keys.stop, device=self.device), self._positions[rows, None]
        hidden = columns > positions
        if window is not None:
            hidden |= columns < window.first_key(positions)
        return hidden

    def _visible(self, rows: slice, window: WindowKind | None) -> slice:
        """Positions that at least one of `rows` sees, and perhaps some between these."""
        low = 0 if window is None else max(0, window.first_key(int(self.positions[rows.start])))
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
        torch.softmax(scores, dim=-1, out=weights)
        if layer.sinks is not None:
            by_head = scores.logsumexp(-1).view(len(scores), -1, group)
            weights.mul_(kept_share(by_head, layer.sinks.view(-1, 1, group)).flatten(1)[..., None])
        return weights

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
    seen = layer.keys[None, :, keys], layer.values[None, :, keys]
    if query.device.type != "cpu":
        with sdpa_kernel(ACCELERATOR_KERNELS):
            return grouped_attention(query[None], *seen, mask, layer.scale)[0]
    return F.scaled_dot_product_attention(
        query[None],
        *seen,
        attn_mask=mask,
        is_causal=mask is None,
        scale=layer.scale,
        enable_gqa=len(query) != len(layer.keys),
    )[0]


def grouped_attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """PyTorch's attention with each K/V head and its group of query heads as one entry of the batch, keys not copied.

    With `enable_gqa` no kernel but cuDNN's takes a mask on a GPU, and the scores would be formed one by one.

    Args:
        query: (1, num_heads, num_rows, head_dim).
        keys: (1, num_kv_heads, num_keys, head_dim); `num_heads` is a multiple of `num_kv_heads`.
        values: Likewise.
        mask: (num_rows, num_keys); None for causal from the first key on.
        scale: Factor of the scores.
    """
    num_kv_heads = keys.shape[1]
    by_head = query.reshape(num_kv_heads, -1, *query.shape[2:])
    shape = (-1, by_head.shape[1], -1, -1)
    mixed = F.scaled_dot_product_attention(
        by_head,
        keys.transpose(0, 1).expand(shape),
        values.transpose(0, 1).expand(shape),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
    )
    return mixed.reshape(1, -1, *mixed.shape[2:])
