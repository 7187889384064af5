"""Moved keys against keys computed at the new position."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from kvgraft.engine.model.adapter import TransformersAdapter
from kvgraft.engine.model.self_check import self_check
from kvgraft.fidelity import cache_argument, cache_of
from kvgraft.graft.executor import RotatedSpans, SpanCopy, copy_spans
from kvgraft.graft.model import SequenceRows
from kvgraft.graft.rope import RopePairing, RopeShift, rotate_keys
from kvgraft.testing.tiny_models import FAMILIES, VOCABULARY, tiny_model


class PoolSource:
    def __init__(self, pool, slots):
        self.pool, self.index = pool, pool.index(slots)

    def read(self, layer):
        return self.pool.read(layer, self.index)


def rotate_pairs(keys, positions, inv_freq, pairing):
    """Rotation by the textbook: one 2x2 matrix per channel pair, float64."""
    result = keys.double().clone()
    half = len(inv_freq)
    for i, frequency in enumerate(inv_freq.double()):
        a, b = (i, i + half) if pairing is RopePairing.HALF else (2 * i, 2 * i + 1)
        angle = (positions.double() * frequency)[:, None]
        first, second = keys[..., a].double(), keys[..., b].double()
        result[..., a] = first * angle.cos() - second * angle.sin()
        result[..., b] = second * angle.cos() + first * angle.sin()
    return result


@pytest.mark.parametrize("pairing", RopePairing)
@pytest.mark.parametrize("rotary_dim", [8, 16])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-4), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
def test_rotation_takes_keys_to_their_new_positions(pairing, rotary_dim, dtype, tolerance):
    raw = torch.randn(50, 2, 16)
    inv_freq = 1.0 / 10_000 ** (torch.arange(0, rotary_dim, 2) / rotary_dim)
    old, new = torch.arange(50), torch.arange(50) + 1_234
    stored = rotate_pairs(raw, old, inv_freq, pairing).to(dtype)
    expected = rotate_pairs(raw, new, inv_freq, pairing)
    moved = rotate_keys(stored, RopeShift.between(old, new, inv_freq), pairing)
    assert moved.dtype == dtype
    assert (moved.double() - expected).abs().max() < tolerance * expected.abs().max()


@pytest.mark.parametrize("pairing", RopePairing)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_stays_in_its_place_keeps_its_bits_beside_what_moves(pairing, dtype):
    """An exact copy is exact to the bit, whatever else is copied with it."""
    keys = torch.randn(2_000, 2, 16).to(dtype)
    inv_freq = 1.0 / 10_000 ** (torch.arange(0, 16, 2) / 16)
    old = torch.arange(2_000)
    new = torch.where(old < 1_500, old, old + 77)
    moved = rotate_keys(keys, RopeShift.between(old, new, inv_freq), pairing)
    assert torch.equal(moved[:1_500], keys[:1_500])
    assert not torch.equal(moved[1_500:], keys[1_500:])


def graft(adapter, span, kv_indices):
    spans = RotatedSpans([span], adapter.rope, adapter.pool.device)
    copy_spans(spans, adapter.pool.place(kv_indices[spans.positions]), range(adapter.num_layers))


@pytest.mark.parametrize("family", FAMILIES)
def test_shifted_graft_equals_recomputation_at_layer_0(family, rng):
    """Layer 0 does not depend on context, so there a graft must be right, whatever stood in front."""
    adapter = TransformersAdapter.create(tiny_model(family), num_slots=600)
    self_check(adapter, np.arange(64))
    document = rng.integers(3, VOCABULARY, 90)
    donor = np.concatenate([rng.integers(3, VOCABULARY, 30), document])
    prompt = np.concatenate([rng.integers(3, VOCABULARY, 111), document])
    donor_slots, grafted, computed = np.arange(120), np.arange(120, 321), np.arange(321, 522)
    adapter.forward([SequenceRows(donor, np.arange(120), donor_slots)])
    adapter.forward([SequenceRows(prompt, np.arange(201), computed)])
    graft(adapter, SpanCopy(PoolSource(adapter.pool, donor_slots[30:]), 30, 111, 90), grafted)
    for read in (adapter.pool.keys, adapter.pool.values):
        actual, expected = read(0)[grafted[111:]], read(0)[computed[111:]]
        assert (actual - expected).abs().max() < 1e-5 * expected.abs().max()


def test_shifted_graft_of_the_whole_context_equals_recomputation_in_every_layer(rng):
    """RoPE attention sees only differences of positions: a prompt moved as a whole keeps its K/V but for the rotation."""
    adapter = TransformersAdapter.create(tiny_model("llama"), num_slots=600)
    self_check(adapter, np.arange(64))
    prompt = rng.integers(3, VOCABULARY, 100)
    adapter.forward([SequenceRows(prompt, np.arange(100), np.arange(100))])
    graft(adapter, SpanCopy(PoolSource(adapter.pool, np.arange(100)), 0, 50, 100), np.arange(100, 400))
    with adapter.stock() as model, torch.inference_mode():
        cache = cache_of(model(torch.from_numpy(prompt)[None], position_ids=torch.arange(50, 150)[None]))
    for layer in range(adapter.num_layers):
        actual = adapter.pool.keys(layer)[150:250]
        expected = cache.layers[layer].keys[0].transpose(0, 1)
        assert (actual - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss", "llama4_text"])
@pytest.mark.parametrize("moved_by", [24, 11])
def test_rows_behind_a_graft_are_what_the_model_computes_from_the_same_keys(family, moved_by, rng):
    """Moved K/V may lie in other chunks than where they were computed: masks and queries go by the new positions."""
    adapter = TransformersAdapter.create(tiny_model(family), num_slots=600)
    self_check(adapter, np.arange(64))
    document, front, question = (rng.integers(3, VOCABULARY, n) for n in (100, moved_by, 40))
    prompt, start = np.concatenate([front, document, question]), moved_by + 100
    slots = np.arange(200, 200 + len(prompt))
    adapter.forward([SequenceRows(document, np.arange(100), np.arange(100))])
    adapter.forward([SequenceRows(front, np.arange(moved_by), slots)])
    graft(adapter, SpanCopy(PoolSource(adapter.pool, np.arange(100)), 0, moved_by, 100), slots)
    cache = DynamicCache()
    for layer in range(adapter.num_layers):
        cache.update(
            *(x.transpose(0, 1)[None] for x in adapter.pool.read(layer, adapter.pool.index(slots[:start]))), layer
        )
    rows = SequenceRows(question, np.arange(start, len(prompt)), slots, num_logits=40)
    actual = adapter.forward([rows])[0].logits
    with adapter.stock() as model, torch.inference_mode():
        expected = model(torch.from_numpy(question)[None], **cache_argument(model, cache)).logits[0]
    assert (actual - expected).abs().max() < 1e-5 * expected.abs().max()


def test_layer_without_rotation_is_copied_as_it_is(rng):
    """Llama 4's NoPE layers: the key of a token is the same wherever it stands."""
    adapter = TransformersAdapter.create(tiny_model("llama4_text", no_rope_layers=[0, 1, 1, 1]), num_slots=600)
    self_check(adapter, np.arange(64))
    assert [spec is None for spec in adapter.rope] == [True, False, False, False]
    document = rng.integers(3, VOCABULARY, 90)
    adapter.forward([SequenceRows(document, np.arange(90), np.arange(90))])
    graft(adapter, SpanCopy(PoolSource(adapter.pool, np.arange(90)), 0, 111, 90), np.arange(120, 321))
    assert torch.equal(adapter.pool.keys(0)[231:321], adapter.pool.keys(0)[:90])
    assert not torch.equal(adapter.pool.keys(1)[231:321], adapter.pool.keys(1)[:90])
