"""Move rotary keys from one position to another: `K(p') = R(p') R(p)^-1 K(p)`.

Angles are formed in float32 from the model's own inverse frequencies, for the old and the new position separately, so
that a moved key carries the same rounding as a key that the model computes at the new position. Which channels form a
pair and which layers rotate at all is described by `RopeSpec`; finding that out is the model adapter's job.

Source: RoFormer, https://arxiv.org/abs/2104.09864.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor


class RopePairing(StrEnum):
    """Which two channels are rotated together."""

    HALF = "half"
    """Channel i with channel i + rotary_dim / 2 (GPT-NeoX, Llama, Qwen, Gemma)."""
    INTERLEAVED = "interleaved"
    """Channel 2i with channel 2i + 1 (GPT-J, GLM, Cohere)."""


@dataclass(frozen=True, slots=True, eq=False)
class RopeSpec:
    """How one layer rotates its keys.

    Attributes:
        inv_freq: float32 (rotary_dim / 2,), the model's own inverse frequencies, scaling included.
        pairing: Which channels form a pair. Channels from `rotary_dim` on are not rotated.
    """

    inv_freq: Tensor
    pairing: RopePairing

    @property
    def rotary_dim(self) -> int:
        """Number of leading channels that are rotated."""
        return 2 * self.inv_freq.shape[0]


@dataclass(frozen=True, slots=True, eq=False)
class RopeShift:
    """The rotation that takes keys from `source` to `target` positions under one inverse-frequency table.

    Attributes:
        cos: float32 (num_tokens, 1, rotary_dim / 2).
        sin: Same shape.
    """

    cos: Tensor
    sin: Tensor

    @classmethod
    def between(cls, source: Tensor, target: Tensor, inv_freq: Tensor) -> RopeShift:
        """Build the rotation for each token; `source` and `target` are 1-D position tensors of equal length."""
        old = source.to(torch.float32)[:, None] * inv_freq
        new = target.to(torch.float32)[:, None] * inv_freq
        old_cos, old_sin, new_cos, new_sin = old.cos(), old.sin(), new.cos(), new.sin()
        cos = new_cos * old_cos + new_sin * old_sin
        sin = new_sin * old_cos - new_cos * old_sin
        return cls(cos[:, None], sin[:, None])


def rotate_keys(keys: Tensor, shift: RopeShift, pairing: RopePairing) -> Tensor:
    """Return `keys` (num_tokens, num_kv_heads, head_dim) rotated by `shift`, in their own dtype.

    The arithmetic is float32; channels beyond the rotary ones pass through. `keys` is not changed.
    Complexity: O(num_tokens * num_kv_heads * head_dim).
    """
    half = shift.cos.shape[-1]
    rotary = keys[..., : 2 * half].to(torch.float32)
    if pairing is RopePairing.HALF:
        first, second = rotary[..., :half], rotary[..., half:]
    else:
        first, second = rotary[..., 0::2], rotary[..., 1::2]
    new_first = (first * shift.cos).addcmul_(second, shift.sin, value=-1.0)
    new_second = (second * shift.cos).addcmul_(first, shift.sin)
    result = torch.empty_like(keys)
    if pairing is RopePairing.HALF:
        result[..., :half], result[..., half : 2 * half] = new_first, new_second
    else:
        result[..., 0 : 2 * half : 2], result[..., 1 : 2 * half : 2] = new_first, new_second
    result[..., 2 * half :] = keys[..., 2 * half :]
    return result
