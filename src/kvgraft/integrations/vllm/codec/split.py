"""Keys and values in two halves of the tensor.

Layout of FlashAttention in vLLM up to 0.20, and of backends that kept it: `(2, blocks, block, heads, dim)`, or
`(blocks, 2, block, heads, dim)` for FlashInfer. Never run on a GPU by us.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.integrations.vllm.codec.base import ViewCodec

if TYPE_CHECKING:
    from torch import Tensor


class SplitCodec(ViewCodec):
    """`halves[0 or 1][block, offset, head]` is a token's key or value; `axis` is that of the two halves."""

    def __init__(self, axis: int) -> None:
        self._axis = axis
        self.block_axis = 1 - axis
        self.name = ("(2, blocks, block, heads, dim)", "(blocks, 2, block, heads, dim)")[axis]

    def matches(self, cache: Tensor, num_kv_heads: int, head_dim: int, block_size: int) -> bool:
        """Require five dimensions, two halves at the axis."""
        return (
            cache.ndim == 5
            and cache.shape[self._axis] == 2
            and tuple(cache.shape[2:]) == (block_size, num_kv_heads, head_dim)
        )

    def views(self, cache: Tensor) -> tuple[Tensor, Tensor]:
        """See `ViewCodec`."""
        keys, values = cache.unbind(self._axis)
        return keys, values
