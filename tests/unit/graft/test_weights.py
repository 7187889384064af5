"""Weights are named by every element of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kvgraft.graft.weights import named_state, weights_digest


def digest(model):
    return weights_digest(named_state(model))


def model(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30), nn.Linear(30, 5, bias=False)).to(dtype)
    made.register_buffer("angles", torch.arange(7.0), persistent=False)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_equal_weights_have_equal_names(dtype):
    assert digest(model(dtype=dtype)) == digest(model(dtype=dtype))
    assert digest(model(dtype=dtype)) != digest(model(1, dtype))


def test_every_element_counts_and_so_does_its_place():
    one = model()
    names = {digest(one)}
    for tensor in (one[0].weight, one[0].bias, one[1].running_mean, one[1].num_batches_tracked, one.angles):
        flat = tensor.data.reshape(-1)
        for index in {0, flat.numel() // 2, flat.numel() - 1}:
            kept = flat[index].clone()
            flat[index] += 1
            names.add(digest(one))
            flat[index] = kept
    assert len(names) == 1 + 4 * 3 + 1
    with torch.no_grad():
        one[0].weight[3, 4], one[0].weight[4, 3] = one[0].weight[4, 3].clone(), one[0].weight[3, 4].clone()
    assert digest(one) not in names


def test_long_tensors_and_views_are_read_whole():
    long = torch.zeros((1 << 20) + 5)
    names = [weights_digest([("w", long)])]
    for index in (0, 1 << 20, len(long) - 1):
        changed = long.clone()
        changed[index] = 1.0
        names.append(weights_digest([("w", changed)]))
    assert len(set(names)) == 4
    square = torch.arange(12.0).reshape(3, 4)
    assert weights_digest([("w", square.T)]) == weights_digest([("w", square.T.contiguous())])
    assert weights_digest([("w", square.T)]) != weights_digest([("w", square.reshape(4, 3))])


def test_names_shapes_and_types_count():
    zeros = torch.zeros(6)
    others = [("v", zeros), ("w", zeros.reshape(2, 3)), ("w", zeros.to(torch.float16)), ("w", zeros[:5])]
    assert len({weights_digest([each]) for each in [("w", zeros), *others]}) == 5
    assert weights_digest([]) == weights_digest([])
    assert weights_digest([("w", zeros[:0])]) != weights_digest([])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.bool, torch.complex64])
def test_quantised_and_odd_types_have_names(dtype):
    one = torch.ones(9).to(dtype)
    other = one.clone()
    other[4] = 0
    assert weights_digest([("w", one)]) != weights_digest([("w", other)])
