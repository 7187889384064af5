"""RoPE read from modules like SGLang's, and refused where moving keys is not what the module does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kvgraft.errors import ModelError
from kvgraft.graft.rope import RopePairing
from kvgraft.integrations.sglang.rope import read_rope

DIM = 16


class RotaryEmbedding(nn.Module):
    """The part of SGLang's class that is read; `stretch` makes angles that are not proportional to the position."""

    def __init__(self, base=10000, is_neox_style=True, position_start=0, stretch=0.0, dtype=torch.float32):
        super().__init__()
        self.base, self.is_neox_style, self.position_start = base, is_neox_style, position_start
        self.head_size = self.rotary_dim = DIM
        positions = torch.arange(8192).float()
        angles = (positions + stretch * positions.sqrt())[:, None] * self._compute_inv_freq(base)
        self.register_buffer("cos_sin_cache", torch.cat([angles.cos(), angles.sin()], -1).to(dtype))

    def _compute_inv_freq(self, base):
        return 1.0 / base ** (torch.arange(0, DIM, 2).float() / DIM)

    def forward_native(self, positions, query, key):
        cos, sin = self.cos_sin_cache[positions].chunk(2, -1)
        if self.is_neox_style:
            first, second = key.chunk(2, -1)
            rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        else:
            first, second = key[:, ::2], key[:, 1::2]
            rotated = torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2)
        return query, rotated


class YaRNScalingRotaryEmbedding(RotaryEmbedding):
    """A name that has not been checked."""


class RadixAttention(nn.Module):
    def __init__(self, layer_id):
        super().__init__()
        self.layer_id = layer_id


class Attention(nn.Module):
    def __init__(self, layer_id, rotary):
        super().__init__()
        self.attn = RadixAttention(layer_id)
        if rotary is not None:
            self.rotary_emb = rotary


def read(*rotaries):
    model = nn.ModuleList(Attention(index, rotary) for index, rotary in enumerate(rotaries))
    return read_rope(model, len(rotaries), torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_neox_style", [True, False])
def test_frequencies_and_pairing_are_the_modules_own(is_neox_style, dtype):
    rotary = RotaryEmbedding(base=50_000, is_neox_style=is_neox_style, dtype=dtype)
    first, second = read(rotary, rotary)
    assert first is second
    assert first.pairing is (RopePairing.HALF if is_neox_style else RopePairing.INTERLEAVED)
    torch.testing.assert_close(first.inv_freq, 1 / 50_000 ** (torch.arange(0, DIM, 2).float() / DIM))


def test_layers_may_rotate_differently():
    slow, fast = read(RotaryEmbedding(base=1_000_000), RotaryEmbedding(base=100))
    assert not torch.equal(slow.inv_freq, fast.inv_freq)


def test_unknown_variant_is_refused():
    with pytest.raises(ModelError, match="YaRNScalingRotaryEmbedding has not been checked"):
        read(YaRNScalingRotaryEmbedding())


def test_angles_that_are_not_proportional_to_the_position_are_refused():
    with pytest.raises(ModelError, match="keys that were moved differ"):
        read(RotaryEmbedding(stretch=0.5))


def test_layer_without_rope_is_refused():
    with pytest.raises(ModelError, match="1 of 2 layers"):
        read(RotaryEmbedding(), None)


def test_positions_that_do_not_begin_at_zero_are_refused():
    with pytest.raises(ModelError, match="begin at 5"):
        read(RotaryEmbedding(position_start=5))
