"""Blocks of our own, laid out like an engine's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def scratch_like(cache: Tensor, num_blocks: int, block_axis: int) -> Tensor:
    """Allocate zeroed blocks whose inner dimensions lie in memory in the order of those of `cache`."""
    strides = cache.stride()
    order = sorted(range(cache.ndim), key=lambda axis: -strides[axis])
    sizes = [num_blocks if axis == block_axis else cache.shape[axis] for axis in order]
    flat = torch.zeros(sizes, dtype=cache.dtype, device=cache.device)
    return flat.permute([order.index(axis) for axis in range(cache.ndim)])
