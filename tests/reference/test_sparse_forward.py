"""The sparse forward against the model's own forward, on random weights of many architectures."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvgraft.engine.attention import sdpa, sequence
from kvgraft.engine.attention.sequence import SequenceAttention
from kvgraft.engine.model import adapter as adapter_module
from kvgraft.engine.model.adapter import TransformersAdapter
from kvgraft.engine.model.self_check import self_check
from kvgraft.errors import ModelError
from kvgraft.graft.model import SequenceRows
from kvgraft.graft.rope import RopePairing
from kvgraft.testing.tiny_models import FAMILIES, ROPE_TYPES, VOCABULARY, tiny_model
from kvgraft.windows import ChunkedWindow, SlidingWindow

NUM_TOKENS = 150


def make_adapter(model, num_slots=400):
    return TransformersAdapter.create(model, num_slots=num_slots)


@torch.inference_mode()
def stock_logits(adapter, token_ids):
    with adapter.stock() as model:
        return model(input_ids=torch.from_numpy(token_ids)[None], use_cache=False).logits[0].float()


def relative_error(actual, expected):
    return float((actual - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_all_positions_give_the_stock_logits(family, rng):
    adapter = make_adapter(tiny_model(family))
    token_ids = rng.integers(3, VOCABULARY, NUM_TOKENS)
    expected = stock_logits(adapter, token_ids)
    slots = rng.permutation(400)[:NUM_TOKENS]
    rows = SequenceRows(token_ids, np.arange(NUM_TOKENS), slots, num_logits=NUM_TOKENS)
    assert relative_error(adapter.forward([rows])[0].logits, expected) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_gaps_inside_exact_kv_give_the_stock_logits(family, rng):
    adapter = make_adapter(tiny_model(family))
    token_ids = rng.integers(3, VOCABULARY, NUM_TOKENS)
    expected = stock_logits(adapter, token_ids)
    slots = np.arange(100, 100 + NUM_TOKENS)
    adapter.forward([SequenceRows(token_ids, np.arange(NUM_TOKENS), slots)])
    gaps = np.sort(rng.permutation(NUM_TOKENS - 1)[:40])
    gaps = np.concatenate([gaps, [NUM_TOKENS - 1]])
    for layer in range(adapter.num_layers):
        adapter.pool.keys(layer)[slots[gaps]] = 7.0
        adapter.pool.values(layer)[slots[gaps]] = -7.0
    rows = SequenceRows(token_ids[gaps], gaps, slots)
    assert relative_error(adapter.forward([rows])[0].logits[-1], expected[-1]) < 1e-5


def test_packed_sequences_do_not_see_one_another(rng):
    adapter = make_adapter(tiny_model("gemma3_text"))
    prompts = [rng.integers(3, VOCABULARY, n) for n in (150, 1, 37)]
    free = np.arange(400)
    batch, expected = [], []
    for token_ids in prompts:
        slots, free = free[: len(token_ids)], free[len(token_ids) :]
        batch.append(SequenceRows(token_ids, np.arange(len(token_ids)), slots))
        expected.append(stock_logits(adapter, token_ids)[-1])
    for output, logits in zip(adapter.forward(batch), expected, strict=True):
        assert relative_error(output.logits[-1], logits) < 1e-5


def test_chunks_give_what_one_pass_gives(rng):
    adapter = make_adapter(tiny_model("mistral"))
    token_ids = rng.integers(3, VOCABULARY, 300)
    slots = np.arange(300)
    expected = stock_logits(adapter, token_ids)[-1]
    for start, stop in ((0, 3), (3, 120), (120, 121), (121, 300)):
        part = np.arange(start, stop)
        output = adapter.forward([SequenceRows(token_ids[part], part, slots)])[0]
    assert relative_error(output.logits[-1], expected) < 1e-5


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "llama4_text"])
def test_attention_mass_is_the_attention_of_the_observed_rows(family, rng):
    adapter = make_adapter(tiny_model(family))
    token_ids = rng.integers(3, VOCABULARY, NUM_TOKENS)
    rows = SequenceRows(token_ids, np.arange(NUM_TOKENS), np.arange(NUM_TOKENS), observed_rows=6)
    mass = adapter.forward([rows])[0].attention_mass
    with adapter.stock() as model, torch.inference_mode():
        attentions = model(
            input_ids=torch.from_numpy(token_ids)[None], output_attentions=True, use_cache=False
        ).attentions
    expected = sum(layer[0, :, -6:].sum(dim=(0, 1)) for layer in attentions)
    torch.testing.assert_close(mass, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_self_check_accepts_the_family(family):
    adapter = make_adapter(tiny_model(family))
    report = self_check(adapter, np.arange(64))
    assert report.refusal is None
    assert report.forward_error < 1e-5
    assert report.rope_error < 1e-5


@pytest.mark.parametrize("rope_type", ROPE_TYPES)
def test_self_check_accepts_rope_types_with_fixed_angles(rope_type):
    adapter = make_adapter(tiny_model("llama", rope_parameters=ROPE_TYPES[rope_type]))
    assert self_check(adapter, np.arange(64)).refusal is None


def test_self_check_finds_pairing_partial_rotation_and_layers_without_rope():
    cohere = make_adapter(tiny_model("cohere2"))
    self_check(cohere, np.arange(64))
    assert [spec and spec.pairing for spec in cohere.rope] == [*[RopePairing.INTERLEAVED] * 3, None]
    partial = make_adapter(tiny_model("gpt_neox"))
    self_check(partial, np.arange(64))
    assert {spec.rotary_dim for spec in partial.rope} == {4}
    assert partial.pool.layers[0].head_dim == 16
    gemma = make_adapter(tiny_model("gemma3_text", num_hidden_layers=6))
    self_check(gemma, np.arange(64))
    assert len({float(spec.inv_freq[1]) for spec in gemma.rope}) == 2


@pytest.mark.parametrize(
    ("parameters", "word"),
    [
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, "dynamic"),
        (
            {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "factor": 4.0,
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
                "original_max_position_embeddings": 1024,
            },
            "longrope",
        ),
    ],
)
def test_self_check_refuses_angles_that_depend_on_length(parameters, word):
    adapter = make_adapter(tiny_model("llama", rope_parameters=parameters))
    report = self_check(adapter, np.arange(64))
    assert word in report.refusal
    assert adapter.rope is None


def test_self_check_refuses_learned_positions():
    report = self_check(make_adapter(tiny_model("gpt2")), np.arange(64))
    assert "no rotary position embedding" in report.refusal


@pytest.mark.parametrize(("family", "word"), [("deepseek_v3", "MLA"), ("bloom", "bloom"), ("stablelm", "attention")])
def test_unsupported_attention_is_refused_in_one_line(family, word):
    with pytest.raises(ModelError, match=word) as caught:
        self_check(make_adapter(tiny_model(family)), np.arange(64))
    assert "\n" not in str(caught.value)


def test_llama4_scales_queries_by_position_not_by_row(rng, monkeypatch):
    """And the gaps would show it, had the adapter forgotten: stock counts rows of the pass behind the cache."""
    test_gaps_inside_exact_kv_give_the_stock_logits("llama4_text", rng)
    monkeypatch.setattr(adapter_module._PoolLayer, "get_seq_length", lambda _: 0)
    with pytest.raises(AssertionError):
        test_gaps_inside_exact_kv_give_the_stock_logits("llama4_text", rng)


@pytest.mark.parametrize("family", ["gpt_oss", "llama4_text"])
@pytest.mark.parametrize("size", [1, 7, 100, 128, 149, 150])
def test_windows_of_any_size_give_the_stock_logits(family, size, rng):
    """Long runs of rows go to a fused kernel, cut where chunks end; pieces of them begin anywhere in a chunk."""
    name = "attention_chunk_size" if family == "llama4_text" else "sliding_window"
    adapter = make_adapter(tiny_model(family, **{name: size}), num_slots=700)
    token_ids, slots = rng.integers(3, VOCABULARY, 600), np.arange(600)
    expected = stock_logits(adapter, token_ids)
    for start, stop in ((0, 130), (130, 420), (420, 421), (421, 600)):
        part = np.arange(start, stop)
        rows = SequenceRows(token_ids[part], part, slots, num_logits=len(part))
        assert relative_error(adapter.forward([rows])[0].logits, expected[part]) < 1e-5


def test_windows_that_do_not_go_together_are_refused(monkeypatch):
    kinds = [ChunkedWindow(24), SlidingWindow(24), None, None]
    monkeypatch.setattr(adapter_module, "layer_window", lambda _config, layer, _told: kinds[layer])
    with pytest.raises(ModelError, match=r"chunks of 24 tokens .*choose another model"):
        make_adapter(tiny_model())


def test_chunks_without_a_size_are_refused():
    model = tiny_model("llama4_text")
    model.config.attention_chunk_size = None  # transformers fills it in where it is missing
    with pytest.raises(ModelError, match="no attention_chunk_size"):
        make_adapter(model)


def test_sinks_that_were_forgotten_would_be_noticed(monkeypatch):
    for module in (sdpa, sequence):
        monkeypatch.setattr(module, "kept_share", lambda lse, _: torch.ones_like(lse))
    with pytest.raises(ModelError, match="self-check failed"):
        self_check(make_adapter(tiny_model("gpt_oss")), np.arange(64))


def test_sinks_that_the_model_keeps_to_itself_are_refused():
    model = tiny_model("llama")
    model.model.layers[0].self_attn.sinks = torch.nn.Parameter(torch.zeros(4))
    with pytest.raises(ModelError, match="attention sinks to itself"):
        make_adapter(model)


def test_bf16_model_passes_the_self_check():
    report = self_check(make_adapter(tiny_model("llama", dtype=torch.bfloat16)), np.arange(64))
    assert report.refusal is None


def assert_scattered_rows_see_no_future(rng, count):
    """Tokens computed again amid K/V of a full prefill get the K/V that they had, though those behind them lie there, too."""
    adapter = make_adapter(tiny_model())
    token_ids, slots = rng.integers(3, VOCABULARY, NUM_TOKENS), np.arange(NUM_TOKENS)
    adapter.forward([SequenceRows(token_ids, np.arange(NUM_TOKENS), slots)])
    exact = [adapter.pool.keys(layer).clone() for layer in range(adapter.num_layers)]
    again = np.sort(rng.permutation(NUM_TOKENS)[:count])
    adapter.forward([SequenceRows(token_ids[again], again, slots)])
    for layer, keys in enumerate(exact):
        assert relative_error(adapter.pool.keys(layer), keys) < 1e-5


def unmask_formed_scores(monkeypatch):
    inner = SequenceAttention._scattered_part

    def unmasked(self, rows, window):
        part = inner(self, rows, window)
        part.hidden.fill_(value=False)
        return part

    monkeypatch.setattr(SequenceAttention, "_scattered_part", unmasked)


def unmask_fused_scores(monkeypatch):
    inner = SequenceAttention._formed_mask

    def unmasked(self, rows, keys, layer):
        return torch.zeros_like(inner(self, rows, keys, layer))

    monkeypatch.setattr(SequenceAttention, "_formed_mask", unmasked)


@pytest.mark.parametrize(
    ("count", "unmask"),
    [(sequence._MIN_MASKED_ROWS - 1, unmask_formed_scores), (sequence._MIN_MASKED_ROWS, unmask_fused_scores)],
)
def test_scattered_rows_see_no_future(rng, monkeypatch, count, unmask):
    """And the test would notice the mask of CacheBlend's code, aligned to the last row instead of to positions."""
    assert_scattered_rows_see_no_future(rng, count)
    unmask(monkeypatch)
    with pytest.raises(AssertionError):
        assert_scattered_rows_see_no_future(rng, count)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "llama4_text"])
def test_scattered_rows_are_the_same_by_either_way(family, rng, monkeypatch):
    """More of them than share a mask, with windows and without, observed ones behind them."""
    adapter = make_adapter(tiny_model(family))
    token_ids, slots = rng.integers(3, VOCABULARY, NUM_TOKENS), np.arange(NUM_TOKENS)
    adapter.forward([SequenceRows(token_ids, np.arange(NUM_TOKENS), slots)])
    again = np.sort(rng.permutation(NUM_TOKENS)[: sequence._MASKED_ROWS + 20])
    rows = SequenceRows(token_ids[again], again, slots, num_logits=len(again), observed_rows=3)
    (fused,) = adapter.forward([rows])
    monkeypatch.setattr(sequence, "_MAX_KEPT_MASKS", 0)
    (unkept,) = adapter.forward([rows])
    assert torch.equal(unkept.logits, fused.logits)
    monkeypatch.setattr(sequence, "_MIN_MASKED_ROWS", len(again) + 1)
    (formed,) = adapter.forward([rows])
    assert relative_error(fused.logits, formed.logits) < 1e-5
    assert relative_error(fused.attention_mass, formed.attention_mass) < 1e-5
