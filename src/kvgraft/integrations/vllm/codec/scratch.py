"""Blocks of our own, laid out like an engine's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def scratch_laid_out_as(cache: Tensor, num_blocks: int, block_axis: int) -> tuple[Tensor, Tensor]:
    """Allocate zeroed blocks with the strides of `cache`, also where pages of other layers lie between its own.

    Returns:
        All the memory, what lies between included, and the view of it that is shaped and strided like `cache`. Dimensions
        outside of blocks are as much closer together as there are fewer blocks.
    """
    own, shape = cache.stride(block_axis), list(cache.shape)
    shape[block_axis] = num_blocks
    strides = [
        stride // cache.shape[block_axis] * num_blocks if stride > own and size > 1 else stride
        for stride, size in zip(cache.stride(), cache.shape, strict=True)
    ]
    length = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory = torch.zeros(length, dtype=cache.dtype, device=cache.device)
    return memory, memory.as_strided(shape, strides)


def scratch_like(cache: Tensor, num_blocks: int, block_axis: int) -> Tensor:
    """Allocate zeroed blocks whose inner dimensions lie in memory in the order of those of `cache`."""
    strides = cache.stride()
    order = sorted(range(cache.ndim), key=lambda axis: -strides[axis])
    sizes = [num_blocks if axis == block_axis else cache.shape[axis] for axis in order]
    flat = torch.zeros(sizes, dtype=cache.dtype, device=cache.device)
    return flat.permute([order.index(axis) for axis in range(cache.ndim)])
