"""Keys and values in two halves of the tensor.

Layout of FlashAttention in vLLM up to 0.20, and of backends that kept it: `(2, blocks, block, heads, dim)`, or
`(blocks, 2, block, heads, dim)` for FlashInfer. Never run on a GPU by us.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class SplitCodec:
    """`halves[0 or 1][block, offset, head]` is a token's key or value; `axis` says where the two halves part."""

    def __init__(self, axis: int) -> None:
        self._axis = axis
        self.block_axis = 1 - axis
        self.name = ("(2, blocks, block, heads, dim)", "(blocks, 2, block, heads, dim)")[axis]

    def matches(self, cache: Tensor, num_kv_heads: int, head_dim: int, block_size: int) -> bool:
        """Five dimensions, two halves at the axis."""
        return (
            cache.ndim == 5
            and cache.shape[self._axis] == 2
            and tuple(cache.shape[2:]) == (block_size, num_kv_heads, head_dim)
        )

    def read(self, cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """O(num_slots * heads * dim)."""
        block_size = cache.shape[2]
        keys, values = cache.unbind(self._axis)
        blocks, offsets = slots // block_size, slots % block_size
        return keys[blocks, offsets], values[blocks, offsets]

    def write(self, cache: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """O(num_slots * heads * dim)."""
        block_size = cache.shape[2]
        key_cache, value_cache = cache.unbind(self._axis)
        blocks, offsets = slots // block_size, slots % block_size
        key_cache[blocks, offsets] = keys.to(cache.dtype)
        value_cache[blocks, offsets] = values.to(cache.dtype)
