"""K/V of 8 bits, `float8_e4m3fn` and its kin: numbers that an engine keeps divided by a scale of the layer.

A rotation is linear, so that keys are rotated as they are stored, in float32, and rounded once: the scale does not take part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def is_float8(dtype: torch.dtype) -> bool:
    """Return whether numbers of this type have 8 bits."""
    return dtype.is_floating_point and dtype.itemsize == 1


def bounded(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `numbers` so that `dtype` can hold them: of 8 bits what is too large becomes the largest, never NaN.

    Kernels of engines do the same. Numbers for a wider type are returned as they are.
    """
    if not is_float8(dtype):
        return numbers
    largest = torch.finfo(dtype).max
    return numbers.clamp(-largest, largest)
