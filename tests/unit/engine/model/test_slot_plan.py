"""How slots are shared between full-attention and window layers."""

from __future__ import annotations

import re

import pytest
import torch

from kvgraft.engine.model.adapter import take_over
from kvgraft.engine.model.flops import ModelFlops
from kvgraft.engine.model.layers import ModelLayers
from kvgraft.engine.model.slot_plan import SlotPlan, build_states, fewest_window_slots, running_states
from kvgraft.errors import ConfigError
from kvgraft.memory import LayerShape
from kvgraft.testing.tiny_models import tiny_model
from kvgraft.windows import ChunkedWindow, SlidingWindow

DTYPE = torch.float32
SHAPE = LayerShape(1, 256)
SLIDING = SlidingWindow(24)


def make_layers(num_full, num_window, window=512):
    return ModelLayers((SHAPE,) * (num_full + num_window), (None,) * num_full + (SlidingWindow(window),) * num_window)


def windowed(layers, *, num_slots=0, kv_bytes=0, max_running=64, ratio=0.0):
    return SlotPlan.windowed(layers, DTYPE, num_slots, kv_bytes, max_running=max_running, ratio=ratio)


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
        ("mistral", (SLIDING,) * 4),
        ("gemma2", (SLIDING, None, SLIDING, None)),
        ("cohere2", (SLIDING, SLIDING, SLIDING, None)),
        ("gpt_oss", (SLIDING, None, SLIDING, None)),
        ("llama4_text", (ChunkedWindow(24),) * 3 + (None,)),
        ("phi3", (None,) * 4),
    ],
)
def test_windows_are_what_layers_ask_their_attention_for(family, windows):
    assert take_over(tiny_model(family, num_hidden_layers=4)).windows == windows


def test_gemma3_has_five_windows_per_full_layer():
    layers = take_over(tiny_model("gemma3_text", num_hidden_layers=12))
    assert layers.windows == (*[SLIDING] * 5, None) * 2
    assert layers.window == SLIDING
    assert not layers.is_all_swa


@pytest.mark.parametrize("ratio", [0.3, 0.75, 1.0])
@pytest.mark.parametrize("num_full", [0, 4])
def test_ratio_says_how_many_window_slots_there_are_per_token(ratio, num_full):
    layers = make_layers(num_full, 22)
    assert windowed(layers, num_slots=10_000, max_running=4, ratio=ratio) == SlotPlan(10_000, int(ratio * 10_000))
    plan = windowed(layers, kv_bytes=1 << 30, max_running=4, ratio=ratio)
    assert plan.num_window_slots == int(ratio * plan.num_slots)
    assert 0.99 * (1 << 30) < num_bytes(layers, plan) <= 1 << 30


def test_ratio_of_a_model_without_windows_means_nothing():
    assert windowed(make_layers(4, 0), num_slots=1_000, ratio=0.1) is None


@pytest.mark.parametrize(
    ("num_slots", "max_running", "ratio", "remedy"),
    [
        (
            10_000,
            10,
            0.2,
            r"max_running 10 with windows of 512 tokens needs 5280: raise it to 0.528, .* max_running to 3$",
        ),
        (4_000, 10, 0.9, r"3600 slots .* needs 5280: raise num_slots or kv_bytes, or lower max_running to 6$"),
        (4_000, 1, 0.1, r"400 slots .* needs 1568: raise it to 0.392, or raise num_slots or kv_bytes$"),
    ],
)
def test_ratio_that_gives_too_few_for_those_who_run_is_refused_in_one_line(num_slots, max_running, ratio, remedy):
    with pytest.raises(ConfigError, match=remedy):
        windowed(make_layers(4, 22), num_slots=num_slots, max_running=max_running, ratio=ratio)


def test_the_remedy_that_is_named_helps():
    layers = make_layers(4, 22)
    assert windowed(layers, num_slots=10_000, max_running=10, ratio=0.528) == SlotPlan(10_000, 5_280)
    assert windowed(layers, num_slots=10_000, max_running=3, ratio=0.2) == SlotPlan(10_000, 2_000)


class TestStates:
    """Of a model with two gated delta nets: 4 heads of 16 x 16, and a convolution of 128 channels over 4 tokens."""

    def test_are_planned_beside_the_slots_of_attention_layers(self):
        layers = take_over(tiny_model("qwen3_next"))
        assert layers.numbers == (1, 3)
        assert layers.bytes_per_state == 2 * (4 * 16 * 16 + 128 * 4) * 4
        plan = SlotPlan.uniform(layers, DTYPE, 0, 1 << 20)
        assert plan == SlotPlan((1 << 20) // (2 * 2 * 2 * 16 * 4), 0, 0)
        states = build_states(layers, SlotPlan(64, num_states=3), torch.device("cpu"))
        assert (states.num_states, states.bytes_per_state) == (3, layers.bytes_per_state)

    def test_get_half_of_the_bytes(self):
        layers = take_over(tiny_model("qwen3_next"))
        token_bytes = sum(layers.bytes_per_token(DTYPE))
        plan = SlotPlan.with_states(layers, DTYPE, 0, 1 << 24, max_running=8)
        states = plan.num_states * layers.bytes_per_state
        assert (1 << 23) - layers.bytes_per_state < states <= 1 << 23
        assert (1 << 24) - token_bytes < states + plan.num_slots * token_bytes <= 1 << 24
        by_number = SlotPlan.with_states(layers, DTYPE, plan.num_slots, 1, max_running=8)
        assert by_number.num_slots == plan.num_slots
        assert by_number.num_states == plan.num_slots * token_bytes // layers.bytes_per_state

    def test_are_never_too_few_to_record_one_beside_each_that_runs(self):
        layers = take_over(tiny_model("qwen3_next"))
        assert SlotPlan.with_states(layers, DTYPE, 64, 1, max_running=8) == SlotPlan(64, num_states=4)
        assert [running_states(number, 8) for number in (4, 5, 16, 40)] == [2, 2, 8, 8]

    def test_too_few_bytes_for_them_are_refused_with_a_remedy_that_helps(self):
        layers = take_over(tiny_model("qwen3_next"))
        with pytest.raises(ConfigError, match="raise it to") as caught:
            SlotPlan.with_states(layers, DTYPE, 0, 1_000, max_running=8)
        needed = int(re.search("raise it to ([0-9]+)", str(caught.value))[1])
        assert SlotPlan.with_states(layers, DTYPE, 0, needed, max_running=8).num_slots >= 64

    def test_get_half_of_host_memory_and_too_little_is_refused_with_a_remedy_that_helps(self):
        layers = take_over(tiny_model("qwen3_next"))
        token_bytes, state_bytes = sum(layers.bytes_per_token(DTYPE)), layers.bytes_per_state
        plan = SlotPlan.on_host(layers, DTYPE, 1 << 24)
        assert (1 << 23) - state_bytes < plan.num_states * state_bytes <= 1 << 23
        assert (1 << 24) - token_bytes < plan.num_states * state_bytes + plan.num_slots * token_bytes <= 1 << 24
        with pytest.raises(ConfigError, match="raise prefix_host_bytes to") as caught:
            SlotPlan.on_host(layers, DTYPE, 1_000)
        needed = int(re.search("prefix_host_bytes to ([0-9]+)", str(caught.value))[1])
        assert SlotPlan.on_host(layers, DTYPE, needed).num_states == 1

    def test_are_none_of_a_model_without_such_layers(self):
        assert build_states(make_layers(2, 0), SlotPlan(64, num_states=3), torch.device("cpu")) is None

    @pytest.mark.parametrize(("num_states", "words"), [(0, "no states are planned"), (1 << 40, "lower max_running")])
    def test_that_cannot_be_had_are_refused(self, num_states, words):
        layers = take_over(tiny_model("qwen3_next"))
        with pytest.raises(ConfigError, match=words):
            build_states(layers, SlotPlan(64, num_states=num_states), torch.device("cpu"))

    def test_cost_operations_of_every_token_and_no_keys(self):
        model = tiny_model("qwen3_next")
        layers = take_over(model)
        flops = ModelFlops.of_model(model, layers)
        assert flops.num_layers == 2
        assert flops.per_visible_key == 4 * 4 * 16 * 2
        plain = ModelFlops.of_model(model, ModelLayers(layers.shapes, layers.windows))
        assert flops.per_token - plain.per_token == 6 * 2 * 4 * 16 * 16
