"""Keys and values in tiles of 16 rows of 16 pairs, as the matrix instructions of AMX read them.

Layout of vLLM's CPU attention for models in bfloat16 on processors with AMX (0.24 to 0.33, head widths and blocks that are
multiples of 32), of K/V in bfloat16 and of 8 bits alike. Per block and head the first half of the bytes holds the keys as
`(block / 16, dim / 2, 16, 2)`: a row has one pair of channels of 16 tokens. The second half holds the values as
`(dim / 16, block / 2, 16, 2)`: a row has 16 channels of one pair of tokens. Read from vLLM's operation, which packs without
AMX too; attention over it was never run by us.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvgraft.integrations.vllm.codec.base import is_float8
from kvgraft.integrations.vllm.codec.cpu import halves, is_cpu_cache

if TYPE_CHECKING:
    from torch import Tensor

_ROWS = 16
_PAIR = 2


class PairedTilesCodec:
    """Views of the two halves; nothing is converted."""

    name = "CPU with AMX (blocks, heads, [block/16, dim/2, 16, 2] keys then [dim/16, block/2, 16, 2] values)"
    block_axis = 0

    def matches(self, cache: Tensor, num_kv_heads: int, head_dim: int, block_size: int) -> bool:
        """Require the shape of the CPU's packed layout, in a dtype that is tiled."""
        is_tiled = head_dim % (_PAIR * _ROWS) == 0 and block_size % (_PAIR * _ROWS) == 0
        is_tiled = is_tiled and (cache.dtype == torch.bfloat16 or is_float8(cache.dtype))
        return is_tiled and is_cpu_cache(cache, (num_kv_heads, head_dim), block_size)

    def read(self, cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """O(num_slots * heads * dim)."""
        keys, values = _tiles(cache)
        blocks, offsets = slots // cache.shape[2], slots % cache.shape[2]
        shape = (len(slots), cache.shape[1], cache.shape[3] // 2)
        return (
            keys[blocks, :, offsets // _ROWS, :, offsets % _ROWS].reshape(shape),
            values[blocks, :, :, offsets // _PAIR, :, offsets % _PAIR].reshape(shape),
        )

    def write(self, cache: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """O(num_slots * heads * dim)."""
        key_tiles, value_tiles = _tiles(cache)
        blocks, offsets = slots // cache.shape[2], slots % cache.shape[2]
        num_slots, num_heads, dim = keys.shape
        key_pairs = keys.to(cache.dtype).reshape(num_slots, num_heads, dim // _PAIR, _PAIR)
        value_rows = values.to(cache.dtype).reshape(num_slots, num_heads, dim // _ROWS, _ROWS)
        key_tiles[blocks, :, offsets // _ROWS, :, offsets % _ROWS] = key_pairs
        value_tiles[blocks, :, :, offsets // _PAIR, :, offsets % _PAIR] = value_rows


def _tiles(cache: Tensor) -> tuple[Tensor, Tensor]:
    """View keys as `(blocks, heads, block/16, dim/2, 16, 2)` and values as `(blocks, heads, dim/16, block/2, 16, 2)`."""
    num_blocks, num_heads, block_size, width = cache.shape
    dim = width // 2
    keys, values = halves(cache)
    return (
        keys.view(num_blocks, num_heads, block_size // _ROWS, dim // _PAIR, _ROWS, _PAIR),
        values.view(num_blocks, num_heads, dim // _ROWS, block_size // _PAIR, _ROWS, _PAIR),
    )
