"""Weights that change in place are noticed; weights that do not are left in peace."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kvgraft.integrations.vllm.worker.weights_witness import WeightsWitness


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(48, 48, dtype=torch.bfloat16) for _ in range(12)))


def test_nothing_happens_while_nothing_changes(model):
    witness = WeightsWitness(model)
    model(torch.zeros(1, 48, dtype=torch.bfloat16))
    assert not any(witness.has_changed() for _ in range(3))


@torch.no_grad()
def test_a_small_step_of_training_is_noticed_once(model):
    """One element in ten moves by its last bit: what a step in bfloat16 does at the least."""
    witness = WeightsWitness(model)
    for parameter in model.parameters():
        moves = torch.rand(parameter.shape) < 0.1
        parameter.data.copy_(torch.where(moves, parameter * 1.01, parameter))
    assert witness.has_changed()
    assert not witness.has_changed()


def test_a_parameter_that_is_replaced_is_noticed(model):
    witness = WeightsWitness(model)
    for layer in model:
        layer.weight = nn.Parameter(torch.ones(48, 48, dtype=torch.bfloat16))
    assert witness.has_changed()


@pytest.mark.parametrize("name", ["_k_scale", "_v_scale"])
def test_another_scale_of_8_bit_keys_or_values_is_noticed_once(model, name):
    for scale in ("_k_scale", "_v_scale"):
        model[3].register_buffer(scale, torch.tensor(1.0))
    model[3].kv_cache_dtype = "fp8"
    witness = WeightsWitness(model)
    assert not witness.has_changed()
    getattr(model[3], name).fill_(0.5)
    assert witness.has_changed()
    assert not witness.has_changed()


def test_a_model_without_parameters_has_nothing_to_change():
    assert not WeightsWitness(nn.ReLU()).has_changed()


@pytest.fixture
def large():
    """As many parameters as a model of some layers has, of several types."""
    torch.manual_seed(0)
    types = (torch.bfloat16, torch.float32, torch.float8_e4m3fn)
    weights = [torch.randn(16, 16).to(types[number % 3]) for number in range(290)]
    return nn.ModuleList(_Weight(weight) for weight in weights)


class _Weight(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)


@torch.no_grad()
def test_one_parameter_of_many_that_is_replaced_is_noticed(large):
    witness = WeightsWitness(large)
    for module in large:
        module.weight.data = (module.weight.float() + 1).to(module.weight.dtype)
        assert witness.has_changed()
    assert not witness.has_changed()


@torch.no_grad()
def test_rows_that_were_added_to_a_vocabulary_are_seen():
    """They stand at an embedding's end."""
    model = nn.Embedding(1000, 64)
    witness = WeightsWitness(model)
    model.weight[990:] += 1.0
    assert witness.has_changed()


def test_parameters_without_elements_are_nothing():
    assert not WeightsWitness(_Weight(torch.empty(0, 4))).has_changed()
