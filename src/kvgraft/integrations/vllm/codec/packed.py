"""Keys and values side by side in the last dimension.

Layout of FlashAttention, FlashInfer and Triton attention in vLLM 0.28 to 0.32: a logical `(blocks, heads, block, 2 * dim)`
whose strides say whether tokens (NHD) or heads (HND) lie outermost in memory. Indexing goes by strides, so that one codec
serves both. Written from the shapes that the backends document; never run on a GPU by us.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class PackedCodec:
    """`cache[block, head, offset]` is a token's key followed by its value."""

    name = "packed (blocks, heads, block, 2 * dim), NHD or HND by strides"
    block_axis = 0

    def matches(self, cache: Tensor, num_kv_heads: int, head_dim: int, block_size: int) -> bool:
        """Four dimensions, the last twice the head's width."""
        return tuple(cache.shape[1:]) == (num_kv_heads, block_size, 2 * head_dim)

    def read(self, cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """O(num_slots * heads * dim)."""
        block_size, dim = cache.shape[2], cache.shape[3] // 2
        tokens = cache[slots // block_size, :, slots % block_size]
        return tokens[..., :dim].contiguous(), tokens[..., dim:].contiguous()

    def write(self, cache: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """O(num_slots * heads * dim)."""
        block_size, dim = cache.shape[2], cache.shape[3] // 2
        blocks, offsets = slots // block_size, slots % block_size
        cache[..., :dim][blocks, :, offsets] = keys.to(cache.dtype)
        cache[..., dim:][blocks, :, offsets] = values.to(cache.dtype)
