"""Scales of 8-bit K/V in a real vLLM, a checkpoint's and one per head, and the measure by which such K/V are compared."""

from __future__ import annotations

import pytest
import torch

from engines import engine, text
from kvgraft.graft.select import FirstK
from kvgraft.integrations.vllm.worker.float8_layer import TOLERANCE, rms_error

DOCUMENT = text(5, 700)
DONOR, PROMPT = text(1, 50) + DOCUMENT + text(3, 40), text(2, 130) + DOCUMENT + text(4, 45)


def test_a_scale_that_is_not_one_is_taken_into_account(model_folder):
    """A checkpoint's: set when the model is loaded, before anything is known of it."""
    scales = {"_k_scale": 0.0625, "_v_scale": 0.25}
    options = {"min_saved_tokens": 0, "correction": "drift"}
    with engine(model_folder, "llama", options=options, kv_cache_dtype="fp8", num_gpu_blocks_override=200) as one:
        for module in one.worker._vllm_config.compilation_config.static_forward_context.values():
            for name, scale in scales.items():
                getattr(module, name).fill_(scale)
                setattr(module, f"{name}_float", scale)
        cold = one.cold(PROMPT, max_tokens=1)
        assert one.worker.refusal == ""
        assert {layer.scales for group in one.worker._groups for layer in group.layers} == {(0.0625, 0.25)}
        one.donate(DONOR)
        answer = one.ask(PROMPT, repair="before", max_tokens=1)
        assert answer.shifted
        assert answer.report["corrected_tokens"]
        one.forget_donors()
        one.donate(DONOR)
        one.worker._policy = FirstK(100_000)
        one.ask(PROMPT, repair="before", max_tokens=1).assert_like(cold, tolerance=0.05)
        one.check()


def test_scales_per_head_are_refused(model_folder, monkeypatch):
    from vllm.model_executor.layers.attention import attention

    def per_head(layer, register_buffer=False, default=attention.set_default_quant_scales):
        default(layer, register_buffer)
        if register_buffer:
            layer.register_buffer("_k_scale", torch.ones(2))

    monkeypatch.setattr(attention, "set_default_quant_scales", per_head)
    with engine(model_folder, "llama", kv_cache_dtype="fp8", num_gpu_blocks_override=100) as one:
        one.ask(PROMPT, max_tokens=1)
        assert "a scale per head" in one.worker.refusal


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_numbers_of_8_bits_may_be_rounded_and_not_be_others(dtype):
    numbers = torch.randn(40, 2, 32, generator=torch.Generator().manual_seed(2))
    stored = numbers.to(dtype)
    flipped = stored.clone().view(torch.uint8)
    flipped[::20] ^= 1  # the last bit: the number beside it
    assert 0 < rms_error(flipped.view(dtype), stored) < TOLERANCE[dtype] / 2
    assert rms_error((numbers * 1.3).to(dtype), stored) > TOLERANCE[dtype]
    assert rms_error(stored.roll(1, 0), stored) > 4 * 4 * TOLERANCE[dtype]
