"""What a model in half precision differs from itself by: measured, and no excuse for a wrong forward pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kvgraft.engine.model.self_check as self_check_module
from kvgraft.engine.model.adapter import TransformersAdapter
from kvgraft.engine.model.own_noise import own_rounding
from kvgraft.engine.model.self_check import probe_slots, self_check
from kvgraft.errors import ModelError
from kvgraft.memory.pool import SlotPlace
from kvgraft.testing.tiny_models import VOCABULARY, tiny_model

HALF = [torch.bfloat16, torch.float16]
TOKENS = np.random.default_rng(0).integers(3, VOCABULARY, 40)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    ("family", "close"),
    # Its mixers read weights of a module that they do not call: a part stays in half precision.
    [("llama", 1e-3), ("gemma2", 1e-3), ("mixtral", 1e-3), ("gpt_oss", 1e-3), ("qwen3_next", 0.2)],
)
def test_rounding_is_what_computing_in_float32_changes(family, close, dtype):
    model = tiny_model(family, dtype=dtype)
    before = {name: (weight.data_ptr(), weight.clone()) for name, weight in model.named_parameters()}
    found = own_rounding(model, TOKENS)
    for name, weight in model.named_parameters():
        place, value = before[name]
        assert (weight.data_ptr(), weight.dtype) == (place, dtype)
        assert torch.equal(weight, value)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with torch.inference_mode():
        inputs = torch.from_numpy(TOKENS)[None]
        own = model(input_ids=inputs, use_cache=False).logits[0, -1].float()
        wide = model.float()(input_ids=inputs, use_cache=False).logits[0, -1]
    assert 0 < found == pytest.approx(float((own - wide).abs().max() / wide.abs().max()), rel=close)


def test_a_model_that_fails_in_float32_keeps_its_weights(monkeypatch):
    model = tiny_model("llama", dtype=torch.bfloat16)
    norm = model.model.norm

    def fails(hidden):
        assert hidden.dtype == torch.bfloat16, "as a kernel that knows one precision"
        return hidden

    monkeypatch.setattr(norm, "forward", fails)
    assert own_rounding(model, TOKENS) == float("inf")
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}


@pytest.fixture
def strict(monkeypatch):
    """A model whose rounding is above the tolerance, as Qwen2.5-Coder-1.5B's is in bfloat16."""
    monkeypatch.setitem(self_check_module.TOLERANCE, torch.bfloat16, 1e-5)
    monkeypatch.setattr(self_check_module, "find_rope", lambda *_: ([None, None], 0.0))  # its tolerance is the same
    monkeypatch.setattr(self_check_module, "_length_error", lambda *_: 0.0)
    return TransformersAdapter.create(tiny_model("llama", dtype=torch.bfloat16), num_slots=200)


def test_an_error_that_is_rounding_passes(strict):
    report = self_check(strict, np.arange(probe_slots(strict)))
    assert report.forward_error > 1e-5


def test_an_error_that_is_more_is_refused(strict, monkeypatch):
    write = SlotPlace.write
    monkeypatch.setattr(self_check_module, "_check_slots", lambda *_: None)  # would see it at once
    monkeypatch.setattr(SlotPlace, "write", lambda place, layer, keys, values: write(place, layer, keys, 1.5 * values))
    with pytest.raises(ModelError, match="which is more than rounding"):
        self_check(strict, np.arange(probe_slots(strict)))


def test_a_precision_that_the_model_is_not_made_for_is_no_excuse(strict, monkeypatch):
    monkeypatch.setattr(self_check_module, "own_rounding", lambda *_: 0.3)
    with pytest.raises(ModelError, match=r"allowed 1.0e-05\), and its own by 3.0e-01 where it is computed in float32"):
        self_check(strict, np.arange(probe_slots(strict)))
