"""Attention backends agree with one another, and a backend that cannot be used is replaced, never an error."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.attention import sdpa_kernel

from kvgraft.engine.attention import ATTENTION_BACKENDS, AttentionHeads, choose_attention, sequence
from kvgraft.engine.attention.choose import difference_to_sdpa
from kvgraft.engine.attention.flex import FlexBackend
from kvgraft.engine.model.adapter import TransformersAdapter
from kvgraft.errors import ConfigError
from kvgraft.graft.model import SequenceRows
from kvgraft.memory.pool import LayerShape
from kvgraft.testing.tiny_models import VOCABULARY, tiny_model

CPU = torch.device("cpu")
SHAPE = LayerShape(2, 16)
HEADS = AttentionHeads(SHAPE, 4)
FAMILIES = ["llama", "gemma2", "gemma3_text", "gpt_oss", "llama4_text"]
unfused = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@unfused
@pytest.mark.parametrize("num_heads", [2, 6])
def test_flex_gives_what_sdpa_gives(num_heads):
    heads = AttentionHeads(SHAPE, num_heads, has_sinks=True)
    assert difference_to_sdpa(FlexBackend(compiled=False), heads, torch.float32, CPU) < 1e-5


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("rows", [40, 7])
def test_what_accelerators_run_is_what_processors_run(num_heads, num_kv_heads, rows):
    query, keys, values = (torch.randn(1, heads, n, 16) for heads, n in ((num_heads, rows), *[(num_kv_heads, 40)] * 2))
    mask = None if rows == 40 else torch.rand(rows, 40) < 0.5
    if mask is not None:
        mask[:, 0] = True
    grouped = sequence.grouped_attention(query, keys, values, mask, 0.3)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, is_causal=mask is None, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(grouped, expected)


def test_accelerators_do_without_the_kernels_that_plan_for_every_length():
    with sdpa_kernel(sequence.ACCELERATOR_KERNELS):
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.flash_sdp_enabled()
        assert torch.backends.cuda.mem_efficient_sdp_enabled()


@unfused
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_forward_is_the_same_with_both(family, rng):
    logits = []
    prompts = [rng.integers(3, VOCABULARY, n) for n in (150, 1, 37, 80)]
    for name in ("sdpa", "flex"):
        adapter = TransformersAdapter.create(tiny_model(family), num_slots=400, attention=name)
        assert adapter.attention.backend.name == name
        slots = np.split(np.arange(400), np.cumsum([len(prompt) for prompt in prompts]))
        batch = [
            SequenceRows(prompt, np.arange(len(prompt)), own, observed_rows=4 * (i == 3))
            for i, (prompt, own) in enumerate(zip(prompts, slots, strict=False))
        ]
        outputs = adapter.forward(batch)
        assert [output.attention_mass is not None for output in outputs] == [False, False, False, True]
        logits.append(torch.cat([output.logits for output in outputs]))
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=1e-5 * float(logits[0].abs().max()))


@pytest.mark.parametrize("family", FAMILIES)
def test_decode_rows_in_a_batch_are_exact_wherever_they_stand(family, rng):
    """Decode rows share a fast path; mixing them with chunks, in any order, changes nothing."""
    adapter = TransformersAdapter.create(tiny_model(family), num_slots=600)
    prompts = [rng.integers(3, VOCABULARY, n) for n in (90, 60, 120, 33)]
    slots = np.split(rng.permutation(600), np.cumsum([len(prompt) for prompt in prompts]))
    whole = [SequenceRows(p, np.arange(len(p)), s) for p, s in zip(prompts, slots, strict=False)]
    expected = [output.logits[-1] for output in adapter.forward(whole)]
    last = [SequenceRows(p[-1:], np.array([len(p) - 1]), s) for p, s in zip(prompts, slots, strict=False)]
    batch = [last[0], whole[1], last[2], last[3]]
    for output, logits in zip(adapter.forward(batch), expected, strict=True):
        torch.testing.assert_close(output.logits[-1], logits, rtol=0, atol=1e-5 * float(logits.abs().max()))


@pytest.mark.parametrize("num_runs", [1, 2, 3, 40])
@pytest.mark.parametrize("family", FAMILIES)
def test_decode_rows_are_exact_however_their_slots_lie(family, num_runs, rng):
    adapter = TransformersAdapter.create(tiny_model(family), num_slots=900)
    prompt = rng.integers(3, VOCABULARY, 400)
    pieces = [piece + 2 * i for i, piece in enumerate(np.array_split(np.arange(400), num_runs))]
    slots = np.concatenate(pieces[::-1])
    expected = adapter.forward([SequenceRows(prompt, np.arange(400), slots)])[0].logits[-1]
    actual = adapter.forward([SequenceRows(prompt[-1:], np.array([399]), slots)])[0].logits[-1]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_auto_is_sdpa_on_a_cpu():
    choice = choose_attention("auto", HEADS, torch.float32, CPU)
    assert (choice.backend.name, choice.reason) == ("sdpa", "sdpa on cpu")


def test_unknown_name_lists_what_exists():
    with pytest.raises(ConfigError, match="auto, flex, sdpa"):
        choose_attention("paged", HEADS, torch.float32, CPU)


class _Broken:
    name = "flex"

    def plan(self, batch, pool):
        raise RuntimeError("no kernel\nfor this device")


class _Wrong:
    name = "flex"

    def plan(self, batch, pool):
        return self

    def attend(self, layer, query):
        return torch.zeros_like(query.query)


class _WithoutSinks(FlexBackend):
    def plan(self, batch, pool):
        batch = super().plan(batch, pool)
        attend = batch.attend
        batch.attend = lambda layer, query: attend(layer, replace(query, sinks=None))
        return batch


@unfused
@pytest.mark.parametrize(("has_sinks", "name"), [(True, "sdpa"), (False, "flex")])
def test_backend_without_sinks_serves_only_models_without_them(has_sinks, name, monkeypatch):
    monkeypatch.setitem(ATTENTION_BACKENDS, "flex", lambda _device: _WithoutSinks(compiled=False))
    choice = choose_attention("flex", replace(HEADS, has_sinks=has_sinks), torch.float32, CPU)
    assert choice.backend.name == name


@pytest.mark.parametrize(("backend", "reason"), [(_Broken, "no kernel"), (_Wrong, "differs from it")])
def test_backend_that_fails_its_check_is_replaced_and_says_why(backend, reason, monkeypatch, caplog):
    monkeypatch.setitem(ATTENTION_BACKENDS, "flex", lambda _device: backend())
    with caplog.at_level("WARNING", logger="kvgraft.engine.attention.choose"):
        choice = choose_attention("flex", HEADS, torch.float32, CPU)
    assert choice.backend.name == "sdpa"
    assert reason in choice.reason
    assert reason in caplog.text
