"""Move rotary keys from one position to another: `K(p') = R(p') R(p)^-1 K(p)`.

Angles are formed in float32 from the model's own inverse frequencies, for the old and the new position separately, so
that a moved key carries the same rounding as a key that the model computes at the new position. `RopeSpec`
describes the channels that form a pair; the model adapter finds it for each layer.

Source: RoFormer, https://arxiv.org/abs/2104.09864.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor


class RopePairing(StrEnum):
    """Pairs of channels that are rotated together."""

    HALF = "half"
    """Channel i with channel i + rotary_dim / 2 (GPT-NeoX, Llama, Qwen, Gemma)."""
    INTERLEAVED = "interleaved"
    """Channel 2i with channel 2i + 1 (GPT-J, GLM, Cohere)."""


@dataclass(frozen=True, slots=True, eq=False)
class RopeSpec:
    """The rotation of one layer's keys: float32 (rotary_dim / 2,) inverse frequencies of the model, scaling included.

    Channels from `rotary_dim` on are not rotated.
    """

    inv_freq: Tensor
    pairing: RopePairing

    @property
    def rotary_dim(self) -> int:
        """Number of leading channels that are rotated."""
        return 2 * self.inv_freq.shape[0]


@dataclass(frozen=True, slots=True, eq=False)
class RopeShift:
    """A rotation of keys per token, `cos` and `sin` each float32 (num_tokens, 1, rotary_dim / 2)."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def between(cls, source: Tensor, target: Tensor, inv_freq: Tensor) -> RopeShift:
        """Build the rotation from `source` to `target`, 1-D position tensors of equal length; where they are equal, none."""
        old = source.to(torch.float32)[:, None] * inv_freq
        new = target.to(torch.float32)[:, None] * inv_freq
        old_cos, old_sin, new_cos, new_sin = old.cos(), old.sin(), new.cos(), new.sin()
        cos = (new_cos * old_cos + new_sin * old_sin).masked_fill((source == target)[:, None], 1.0)  # to the bit
        sin = new_sin * old_cos - new_cos * old_sin
        return cls(cos[:, None], sin[:, None])

    def part(self, tokens: slice) -> RopeShift:
        """View the rotation of some of the tokens."""
        return RopeShift(self.cos[tokens], self.sin[tokens])


_SLICE_ELEMENTS = 1 << 18
"""Channels that are rotated at a time: the float32 temporaries then stay in a processor's cache, four times faster at 8K."""


def rotate_keys(keys: Tensor, shift: RopeShift, pairing: RopePairing, out: Tensor | None = None) -> Tensor:
    """Return `keys` (num_tokens, num_kv_heads, head_dim) rotated by `shift`, in their own dtype; those of 8 bits in float32.

    The arithmetic is float32; channels beyond the rotary ones pass through. `keys` is not changed.

    Args:
        keys: To be rotated.
        shift: One rotation per token.
        pairing: Channels that are rotated together.
        out: Takes the result, shaped like `keys` and in any dtype, sharing no memory with them; None for a new tensor.

    Complexity: O(num_tokens * num_kv_heads * head_dim).
    """
    result = torch.empty_like(keys, dtype=torch.float32 if keys.itemsize == 1 else None) if out is None else out
    num_tokens = len(keys)
    step = num_tokens if keys.device.type != "cpu" else max(1, _SLICE_ELEMENTS // max(1, keys[:1].numel()))
    for start in range(0, num_tokens, max(1, step)):
        part = slice(start, start + step)
        _rotate_into(result[part], keys[part], shift.cos[part], shift.sin[part], pairing)
    return result


def _rotate_into(result: Tensor, keys: Tensor, cos: Tensor, sin: Tensor, pairing: RopePairing) -> None:
    half = cos.shape[-1]
    if pairing is RopePairing.HALF:
        first, second = slice(0, half), slice(half, 2 * half)
    else:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    is_whole = pairing is RopePairing.HALF and 2 * half == keys.shape[-1]
    if is_whole and keys.dtype == result.dtype == torch.float32:
        # Nothing is converted or left over: whole rows at a time take two thirds of the time, and give the same bits.
        partners = torch.cat((keys[..., second], keys[..., first]), -1)
        torch.mul(keys, torch.cat((cos, cos), -1), out=result)
        result.addcmul_(partners, torch.cat((-sin, sin), -1))
    else:
        a, b = keys[..., first].to(torch.float32), keys[..., second].to(torch.float32)
        result[..., first] = (a * cos).addcmul_(b, sin, value=-1.0)
        result[..., second] = (b * cos).addcmul_(a, sin)
        result[..., 2 * half :] = keys[..., 2 * half :]
