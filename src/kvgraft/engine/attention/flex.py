"""Variable-length attention through PyTorch's FlexAttention: one kernel for all sequences of a forward pass.

Rows and keys of all sequences are packed side by side; a block mask says which tiles of keys a tile of rows can see, a mask
function decides inside a tile. On CUDA the kernel is compiled; elsewhere PyTorch evaluates the same functions unfused,
which is slow and good for checks. Rows with observed attention go to `SequenceAttention`, because a fused kernel does
not give its weights away. Source: https://pytorch.org/blog/flexattention/.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from kvgraft.engine.attention.sdpa import SdpaBatch
from kvgraft.graft.sinks import kept_share

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvgraft.engine.attention.base import LayerQuery
    from kvgraft.graft.model import SequenceRows
    from kvgraft.memory.pool import SlotPool
    from kvgraft.windows import WindowKind

_TILE = 128
"""Rows and keys of a tile, FlexAttention's own default."""


class FlexBackend:
    """FlexAttention over packed sequences; compiled where `compiled` is set."""

    name = "flex"

    def __init__(self, *, compiled: bool) -> None:
        kernel: Any = flex_attention
        self._kernel: Callable[..., Any] = torch.compile(kernel, dynamic=True) if compiled else kernel

    def plan(self, batch: Sequence[SequenceRows], pool: SlotPool) -> FlexBatch:
        """Lay out `batch`. O(rows + keys + tiles)."""
        return FlexBatch(batch, pool, self._kernel)


class FlexBatch:
    """One forward pass of `FlexBackend`."""

    def __init__(self, batch: Sequence[SequenceRows], pool: SlotPool, kernel: Callable[..., Any]) -> None:
        self._pool = pool
        self._fused: PackedSequences | None = None
        self._observed: SdpaBatch | None = None
        fused = [i for i, rows in enumerate(batch) if not rows.observed_rows]
        observed = [i for i, rows in enumerate(batch) if rows.observed_rows]
        ends = np.cumsum([len(rows.positions) for rows in batch])
        self._rows = {True: _row_index(batch, fused, ends, pool), False: _row_index(batch, observed, ends, pool)}
        if fused:
            self._fused = PackedSequences([batch[i] for i in fused], pool, kernel)
        if observed:
            self._observed = SdpaBatch([batch[i] for i in observed], pool)
        self._places = observed
        self._num_sequences = len(batch)

    @property
    def masses(self) -> list[Tensor | None]:
        """See `BatchAttention`."""
        masses: list[Tensor | None] = [None] * self._num_sequences
        if self._observed is not None:
            for place, mass in zip(self._places, self._observed.masses, strict=True):
                masses[place] = mass
        return masses

    def attend(self, layer: int, query: LayerQuery) -> Tensor:
        """See `BatchAttention`."""
        output = torch.empty_like(query.query)
        for is_fused, part in ((True, self._fused), (False, self._observed)):
            if part is not None:
                rows = self._rows[is_fused]
                output[:, rows] = part.attend(layer, _with_rows(query, rows))
        return output


class PackedSequences:
    """Rows and keys of several sequences side by side, and the mask between them."""

    def __init__(self, batch: Sequence[SequenceRows], pool: SlotPool, kernel: Callable[..., Any]) -> None:
        self._pool = pool
        self._kernel = kernel
        lengths = np.array([int(rows.positions[-1]) + 1 for rows in batch])
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        slots = np.concatenate([rows.kv_indices[:n] for rows, n in zip(batch, lengths, strict=True)])
        self._slots = pool.index(slots)
        positions = np.concatenate([rows.positions for rows in batch])
        sequence = np.repeat(np.arange(len(batch)), [len(rows.positions) for rows in batch])
        # Key numbers, in the packed order, of each row's sequence start and of the row itself.
        self._first: NDArray[np.int64] = starts[sequence]
        self._last: NDArray[np.int64] = starts[sequence] + positions
        self._num_keys = int(lengths.sum())
        self._masks: dict[WindowKind | None, BlockMask] = {}

    def attend(self, layer: int, query: LayerQuery) -> Tensor:
        """Return (num_heads, num_rows, head_dim)."""
        keys = self._pool.keys(layer)[self._slots].transpose(0, 1)[None]
        values = self._pool.values(layer)[self._slots].transpose(0, 1)[None]
        if query.window not in self._masks:
            self._masks[query.window] = self._mask(query.window)
        kernel = self._kernel if query.sinks is None else partial(self._kernel, return_aux=_log_sum_exp())
        result = kernel(
            query.query[None].contiguous(),
            keys,
            values,
            score_mod=None if query.softcap is None else _soft_cap(query.softcap, self._pool.device),
            block_mask=self._masks[query.window],
            scale=query.scale,
            enable_gqa=query.query.shape[0] != keys.shape[1],
        )
        mixed: Tensor
        if query.sinks is None:
            (mixed,) = result
            return mixed
        (mixed,), aux = result
        return (mixed * kept_share(aux.lse[0], query.sinks[:, None])[..., None]).to(mixed.dtype)

    def _mask(self, window: WindowKind | None) -> BlockMask:
        first = self._first
        if window is not None:
            first = first + np.maximum(0, window.first_key(self._last - first))
        num_keys, device = self._num_keys, self._pool.device
        low, high = torch.from_numpy(first).to(device), torch.from_numpy(self._last).to(device)

        def sees(_batch: Tensor, _head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            return (key >= low[row]) & (key <= high[row])

        # A tile of rows sees keys from its lowest first to its highest last key: one run of tiles.
        edges = np.arange(0, len(first), _TILE)
        first_tile = np.minimum.reduceat(first, edges) // _TILE
        num_tiles = np.maximum.reduceat(self._last, edges) // _TILE + 1 - first_tile
        tiles = first_tile[:, None] + np.arange(-(-num_keys // _TILE))
        tiles = np.where(np.arange(tiles.shape[1]) < num_tiles[:, None], tiles, 0)
        return BlockMask.from_kv_blocks(
            torch.from_numpy(num_tiles.astype(np.int32)).to(device)[None, None],
            torch.from_numpy(tiles.astype(np.int32)).to(device)[None, None],
            BLOCK_SIZE=_TILE,
            mask_mod=sees,
            seq_lengths=(len(first), num_keys),
        )


def _log_sum_exp() -> Any:  # noqa: ANN401 - PyTorch's AuxRequest
    """Ask the kernel for the log of the sum over each row's keys; PyTorch before 2.9 fails here, and `sdpa` takes over."""
    from torch.nn.attention.flex_attention import AuxRequest

    return AuxRequest(lse=True)


@cache
def _soft_cap(cap: float, device: torch.device) -> Callable[..., Tensor]:
    """Bound scores by `cap`, a tensor because the compiler takes no numbers; cached because a new function recompiles."""
    bound = torch.tensor(cap, device=device)

    def soft_cap(score: Tensor, *_: Tensor) -> Tensor:
        return bound * torch.tanh(score / bound)

    return soft_cap


def _row_index(batch: Sequence[SequenceRows], chosen: list[int], ends: NDArray[np.int64], pool: SlotPool) -> Tensor:
    """Rows of the `chosen` sequences in the packed batch."""
    parts = [np.arange(ends[i] - len(batch[i].positions), ends[i]) for i in chosen]
    rows = np.concatenate(parts) if parts else np.empty(0, np.int64)
    return torch.from_numpy(rows).to(pool.device)


def _with_rows(query: LayerQuery, rows: Tensor) -> LayerQuery:
    return replace(query, query=query.query[:, rows])
