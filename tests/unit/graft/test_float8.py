"""K/V of 8 bits: what is moved or corrected comes in float32, to be rounded once where it is stored."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvgraft.graft.drift import DriftCorrection
from kvgraft.graft.drift_estimate import MeanShift
from kvgraft.graft.drift_layout import DriftRun, RunLayout
from kvgraft.graft.rope import RopePairing, RopeShift, RopeSpec, rotate_keys
from kvgraft.memory.block import KVBlock
from kvgraft.memory.packed import PackedLayout, packed
from kvgraft.memory.store.layout import RowLayout

TYPES = [torch.float8_e4m3fn, torch.float8_e5m2]
TABLE = 1.0 / 10_000 ** (torch.arange(0, 32, 2) / 32)


def numbers(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def shift(num_tokens, by):
    source = torch.arange(num_tokens)
    return RopeShift.between(source, source + by, TABLE)


@pytest.mark.parametrize("pairing", list(RopePairing))
@pytest.mark.parametrize("dtype", TYPES)
def test_keys_are_rotated_in_float32_and_not_rounded(dtype, pairing):
    keys = numbers(1, 50, 2, 32).to(dtype)
    moved = rotate_keys(keys, shift(50, 77), pairing)
    assert moved.dtype == torch.float32
    assert torch.equal(moved, rotate_keys(keys.float(), shift(50, 77), pairing))


@pytest.mark.parametrize("dtype", TYPES)
def test_drift_of_stored_numbers_is_corrected_whatever_the_scale(dtype):
    """A shift that all tokens of a run share, in numbers that an engine multiplies with some scale when it attends."""
    sample, rest = np.arange(0, 60, 3), np.setdiff1d(np.arange(60), np.arange(0, 60, 3))
    spec = RopeSpec(TABLE, RopePairing.HALF)
    exact, by = numbers(2, 60, 2, 32), numbers(3, 1, 2, 32)
    turned = rotate_keys(
        by.expand(60, 2, 32), shift(60, 0).between(torch.zeros(60), torch.arange(60), TABLE), spec.pairing
    )
    reused = (exact + turned).to(dtype), (exact + by).to(dtype)
    new = exact[sample].to(dtype), exact[sample].to(dtype)
    layout = RunLayout.of((DriftRun(sample, rest),), torch.device("cpu"))
    correction = DriftCorrection(MeanShift(shrink=False), first_layer=0)
    found = correction.corrected(
        layout, new, tuple(part[sample] for part in reused), tuple(part[rest] for part in reused), spec
    )
    for corrected, before in zip(found, reused, strict=True):
        assert corrected.dtype == torch.float32
        error = (corrected.to(dtype).float() - exact[rest]).square().mean()
        assert error < 0.02 * (before[rest].float() - exact[rest]).square().mean()


@pytest.mark.parametrize("dtype", TYPES)
def test_blocks_and_rows_of_stores_keep_them_bit_by_bit(dtype):
    halves = [tuple(numbers(10 * layer + part, 30, 2, 32).to(dtype) for layer in range(3)) for part in (0, 1)]
    block = KVBlock(*halves)
    joined = packed([block.span(0, 11), block.span(11, 19)])
    assert PackedLayout.of(block).bytes_per_token == 3 * 2 * 2 * 32
    layout = RowLayout.of(block)
    stored = layout.unpack(layout.pack(joined))
    for kept, given in zip((*stored.keys, *stored.values), (*block.keys, *block.values), strict=True):
        assert torch.equal(kept.contiguous().view(torch.uint8), given.view(torch.uint8))
