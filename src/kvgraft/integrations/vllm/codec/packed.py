"""Keys and values side by side in the last dimension.

Layout of FlashAttention, FlashInfer and Triton attention in vLLM 0.28 to 0.32: a logical `(blocks, heads, block, 2 * dim)`
with tokens (NHD) or heads (HND) outermost in memory, as its strides show. Indexing goes by strides, so that one codec
serves both. Written from the shapes that the backends document; never run on a GPU by us.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.integrations.vllm.codec.base import ViewCodec

if TYPE_CHECKING:
    from torch import Tensor


class PackedCodec(ViewCodec):
    """`cache[block, head, offset]` is a token's key followed by its value."""

    name = "packed (blocks, heads, block, 2 * dim), NHD or HND by strides"
    block_axis = 0

    def matches(self, cache: Tensor, num_kv_heads: int, head_dim: int, block_size: int) -> bool:
        """Require four dimensions, the last twice the head's width."""
        return tuple(cache.shape[1:]) == (num_kv_heads, block_size, 2 * head_dim)

    def views(self, cache: Tensor) -> tuple[Tensor, Tensor]:
        """See `ViewCodec`."""
        keys, values = cache.transpose(1, 2).tensor_split(2, dim=3)
        return keys, values
