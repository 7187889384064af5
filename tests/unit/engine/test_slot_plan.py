"""How slots are shared between full-attention and window layers."""

from __future__ import annotations

import pytest
import torch

from kvgraft.engine.adapter import take_over
from kvgraft.engine.layers import ModelLayers
from kvgraft.engine.slot_plan import SlotPlan, fewest_window_slots
from kvgraft.memory import LayerShape
from kvgraft.testing.tiny_models import tiny_model

DTYPE = torch.float32
SHAPE = LayerShape(1, 256)


def make_layers(num_full, num_window, window=512):
    return ModelLayers((SHAPE,) * (num_full + num_window), (None,) * num_full + (window,) * num_window)


def windowed(layers, *, num_slots=0, kv_bytes=0, max_running=64):
    return SlotPlan.windowed(layers, DTYPE, num_slots, kv_bytes, max_running=max_running)


def num_bytes(layers, plan):
    full_bytes, window_bytes = layers.bytes_per_token(DTYPE)
    return plan.num_slots * full_bytes + plan.num_window_slots * window_bytes


@pytest.mark.parametrize(("num_full", "num_window"), [(4, 22), (12, 12), (1, 3)])
@pytest.mark.parametrize("kv_bytes", [1 << 26, 1 << 30, 1 << 35])
def test_bytes_are_used_up_and_not_exceeded(num_full, num_window, kv_bytes):
    layers = make_layers(num_full, num_window, window=128)
    plan = windowed(layers, kv_bytes=kv_bytes)
    assert 0.99 * kv_bytes < num_bytes(layers, plan) <= kv_bytes
    assert plan.num_window_slots <= plan.num_slots / 2 + 1
    assert plan.num_slots > SlotPlan.uniform(layers, DTYPE, 0, kv_bytes).num_slots


def test_window_space_grows_no_further_than_running_requests_need():
    plan = windowed(make_layers(4, 22), kv_bytes=1 << 36, max_running=8)
    assert plan.num_window_slots == 2 * 8 * 512 + 2048


def test_counted_slots_are_those_of_tokens():
    assert windowed(make_layers(4, 22), num_slots=10_000) == SlotPlan(10_000, 5_000)
    assert windowed(make_layers(4, 22), num_slots=10_000, max_running=1) == SlotPlan(10_000, 2 * 512 + 2048)
    assert windowed(make_layers(4, 22), num_slots=2_000) == SlotPlan(2_000, fewest_window_slots(512))


def test_windows_too_large_for_the_pool_are_not_planned():
    assert windowed(make_layers(4, 22), num_slots=1_500) is None
    assert windowed(make_layers(4, 22), kv_bytes=1 << 20) is None


def test_model_without_windows_is_not_planned():
    assert windowed(make_layers(4, 0), num_slots=10_000) is None


def test_model_with_windows_only_has_more_numbers_than_bytes():
    layers = make_layers(0, 26)
    plan = windowed(layers, kv_bytes=1 << 30)
    assert plan.num_slots == 16 * plan.num_window_slots
    assert 0.99 * (1 << 30) < num_bytes(layers, plan) <= 1 << 30


@pytest.mark.parametrize(
    ("family", "windows"),
    [
        ("llama", (None,) * 4),
        ("mistral", (24,) * 4),
        ("gemma2", (24, None, 24, None)),
        ("cohere2", (24, 24, 24, None)),
        ("phi3", (None,) * 4),
    ],
)
def test_windows_are_what_layers_ask_their_attention_for(family, windows):
    assert take_over(tiny_model(family)).windows == windows


def test_gemma3_has_five_windows_per_full_layer():
    layers = take_over(tiny_model("gemma3_text", num_hidden_layers=12))
    assert layers.windows == (24, 24, 24, 24, 24, None) * 2
    assert layers.sliding_window_size == 24
    assert not layers.is_all_swa
