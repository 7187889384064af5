"""Keys transposed, then values, per block and head.

Layout of vLLM's CPU attention for its `vec` and `vec16` kernels: `(blocks, heads, block, 2 * dim)` in shape, but per block
and head the first half of the bytes holds the keys as `(dim, block)` and the second half the values as `(block, dim)`. Found
by writing through the backend and reading back; the AMX kernel packs both otherwise (`amx.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.integrations.vllm.codec.base import ViewCodec

if TYPE_CHECKING:
    from torch import Tensor


class TransposedKeysCodec(ViewCodec):
    """Views of the two halves; nothing is converted."""

    name = "CPU (blocks, heads, [dim, block] keys then [block, dim] values)"
    block_axis = 0

    def matches(self, cache: Tensor, num_kv_heads: int, head_dim: int, block_size: int) -> bool:
        """Require the shape of the packed layout, in host memory and contiguous within a block."""
        return is_cpu_cache(cache, (num_kv_heads, head_dim), block_size)

    def views(self, cache: Tensor) -> tuple[Tensor, Tensor]:
        """See `ViewCodec`."""
        keys, values = halves(cache)
        num_blocks, num_heads, block_size, dim = keys.shape
        return keys.view(num_blocks, num_heads, dim, block_size).permute(0, 3, 1, 2), values.transpose(1, 2)


def is_cpu_cache(cache: Tensor, heads: tuple[int, int], block_size: int) -> bool:
    """Return whether a cache has the shape of the CPU backend's, for `heads`: their number and width."""
    num_kv_heads, head_dim = heads
    return (
        cache.device.type == "cpu"
        and tuple(cache.shape[1:]) == (num_kv_heads, block_size, 2 * head_dim)
        and cache.stride()[1:] == (2 * head_dim * block_size, 2 * head_dim, 1)
    )


def halves(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of the keys' and the values' part of a cache, each `(blocks, heads, block, dim)` in shape."""
    num_blocks, num_heads, block_size, width = cache.shape
    rows = cache.view(num_blocks, num_heads, 2 * block_size, width // 2)
    return rows[:, :, :block_size], rows[:, :, block_size:]
