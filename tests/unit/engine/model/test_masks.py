"""Models whose rows see other keys than kvgraft knows are refused, however far from a short text that begins."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import masking_utils
from transformers.models.llama import modeling_llama

from kvgraft.cli import main
from kvgraft.engine import LLM, SamplingParams
from kvgraft.engine.model.adapter import TransformersAdapter
from kvgraft.engine.model.loading import adopt_model
from kvgraft.errors import ModelError
from kvgraft.testing.tiny_models import FAMILIES, VOCABULARY, tiny_model


def test_a_model_that_masks_by_itself_is_refused(rng):
    """Doge leaves out keys behind its 2,048th, which a check of a short text cannot see."""
    with pytest.raises(ModelError, match="masks of its own"):
        LLM(adopt_model("doge", tiny_model("doge"), None), num_slots=100)


def test_doctor_says_which(tmp_path, capsys):
    tiny_model("doge").save_pretrained(tmp_path)
    assert main(["doctor", "--model", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "doge" in error.lower()
    assert "masks of its own" in " ".join(error.split())


def test_a_mask_that_begins_beyond_the_probe_is_refused(monkeypatch):
    """A llama whose model masks what is further away than a length that its layers do not name."""

    def create_far_mask(config, inputs_embeds, attention_mask, past_key_values, **options):
        overlay = masking_utils.sliding_window_overlay(2048)
        return masking_utils.create_causal_mask(
            config, inputs_embeds, attention_mask, past_key_values, and_mask_function=overlay, **options
        )

    monkeypatch.setattr(
        modeling_llama,
        "create_causal_mask",
        lambda **given: create_far_mask(
            given.pop("config"),
            given.pop("inputs_embeds"),
            given.pop("attention_mask"),
            given.pop("past_key_values", None) or given.pop("cache", None),
            **given,
        ),
    )
    with pytest.raises(ModelError, match=r"rows of layer 0 .*do not see all keys"):
        TransformersAdapter.create(tiny_model("llama", far_keys=2048), num_slots=64)


def test_attention_that_is_told_more_is_refused(monkeypatch):
    """Sparse attention is told which blocks of keys a row may see."""
    forward = modeling_llama.LlamaAttention.forward

    def chosen(self, *arguments, **options):
        return forward(self, *arguments, block_indices=torch.zeros(1), **options)

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", chosen)
    with pytest.raises(ModelError, match="block_indices"):
        TransformersAdapter.create(tiny_model("llama"), num_slots=64)


@pytest.mark.parametrize("family", FAMILIES)
def test_known_masks_are_served(family, rng):
    llm = LLM(adopt_model(family, tiny_model(family), None), num_slots=200)
    assert llm.generate(rng.integers(3, VOCABULARY, 60), SamplingParams(2, ignore_eos=True))
    assert not np.isnan(llm.self_check.forward_error)
