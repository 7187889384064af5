"""What must not pass for proved."""

from __future__ import annotations

import math

import pytest
import torch

from kvgraft.graft.rope import RopePairing, RopeShift, RopeSpec, rotate_keys
from kvgraft.graft.rope_proof import find_rotations, refused_rope_parameters, relative_error

POSITIONS = (0, 1, 7, 130)
TABLE = 1.0 / 10_000 ** (torch.arange(0, 8, 2) / 8)


def keys_of(spec):
    """Keys of one token at each position."""
    keys = torch.randn(1, 2, 8, generator=torch.Generator().manual_seed(0)).expand(len(POSITIONS), 2, 8)
    if spec is None:
        return keys
    target = torch.tensor(POSITIONS)
    return rotate_keys(keys, RopeShift.between(torch.zeros_like(target), target, spec.inv_freq), spec.pairing)


@pytest.mark.parametrize("pairing", [None, *RopePairing])
def test_each_layer_s_own_rotation_is_found(pairing):
    spec = None if pairing is None else RopeSpec(TABLE, pairing)
    (found,), worst = find_rotations([keys_of(spec)], POSITIONS, [TABLE / 3, TABLE])
    assert worst < 1e-6
    assert (found is None) == (spec is None)
    assert found is None or (found.pairing, found.inv_freq is TABLE) == (pairing, True)


def test_keys_that_nothing_explains_are_far_off():
    noise = torch.randn(len(POSITIONS), 2, 8, generator=torch.Generator().manual_seed(1))
    assert find_rotations([noise], POSITIONS, [TABLE])[1] > 0.1


def test_keys_that_are_no_numbers_are_no_proof():
    broken = keys_of(None).clone()
    broken[2, 0, 0] = math.nan
    assert find_rotations([keys_of(None), broken], POSITIONS, [TABLE])[1] == math.inf
    assert relative_error(torch.tensor([1.0]), torch.tensor([math.nan])) == math.inf


@pytest.mark.parametrize(
    ("parameters", "part"),
    [
        ({"rope_type": "dynamic"}, "dynamic"),
        ({"full": {"rope_type": "default"}, "sliding": {"type": "longrope"}}, "longrope"),
        ({"rope_type": "default", "mrope_section": [1, 2]}, "M-RoPE"),
    ],
)
def test_angles_that_may_depend_on_more_than_the_position_are_refused(parameters, part):
    assert part in refused_rope_parameters(parameters)
    assert refused_rope_parameters({"rope_type": "llama3"}) is None
    assert refused_rope_parameters({"full": {"rope_type": "proportional"}, "sliding": {"rope_type": "yarn"}}) is None
