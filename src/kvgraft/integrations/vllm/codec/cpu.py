"""Keys transposed, then values, per block and head.

Layout of vLLM's CPU attention for its `vec` and `vec16` kernels: `(blocks, heads, block, 2 * dim)` in shape, but per block
and head the first half of the bytes holds the keys as `(dim, block)` and the second half the values as `(block, dim)`. Found
by writing through the backend and reading back; the AMX kernel packs keys otherwise and does not pass the self-check.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class TransposedKeysCodec:
    """Views of the two halves; nothing is converted."""

    name = "CPU (blocks, heads, [dim, block] keys then [block, dim] values)"
    block_axis = 0

    def matches(self, cache: Tensor, num_kv_heads: int, head_dim: int, block_size: int) -> bool:
        """The shape of the packed layout, in host memory and contiguous within a block."""
        heads_stride = 2 * head_dim * block_size
        return (
            cache.device.type == "cpu"
            and tuple(cache.shape[1:]) == (num_kv_heads, block_size, 2 * head_dim)
            and cache.stride()[1:] == (heads_stride, 2 * head_dim, 1)
        )

    def read(self, cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """O(num_slots * heads * dim)."""
        keys, values = _halves(cache)
        block_size = cache.shape[2]
        blocks, offsets = slots // block_size, slots % block_size
        return keys[blocks, :, :, offsets], values[blocks, :, offsets]

    def write(self, cache: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """O(num_slots * heads * dim)."""
        key_cache, value_cache = _halves(cache)
        block_size = cache.shape[2]
        blocks, offsets = slots // block_size, slots % block_size
        key_cache[blocks, :, :, offsets] = keys.to(cache.dtype)
        value_cache[blocks, :, offsets] = values.to(cache.dtype)


def _halves(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Keys `(blocks, heads, dim, block)` and values `(blocks, heads, block, dim)` of a cache, as views."""
    num_blocks, num_heads, block_size, width = cache.shape
    dim = width // 2
    rows = cache.view(num_blocks, num_heads, 2 * block_size, dim)
    return rows[:, :, :block_size].view(num_blocks, num_heads, dim, block_size), rows[:, :, block_size:]
