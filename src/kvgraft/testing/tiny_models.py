"""Tiny random-weight decoders of many architectures, built in memory in milliseconds.

Random weights are right for exactness and plumbing; they say nothing about output quality.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCABULARY = 500

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "mistral": {"sliding_window": 24},
    "gemma2": {"head_dim": 32, "sliding_window": 24, "attn_logit_softcapping": 2.0},
    "gemma3_text": {"head_dim": 32, "sliding_window": 24},
    "phi3": {"pad_token_id": 0},
    "olmo2": {},
    "cohere": {},
    "cohere2": {"sliding_window": 24},
    "granite": {},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"head_dim": 32, "num_experts": 8, "moe_intermediate_size": 64, "num_experts_per_tok": 2},
    "smollm3": {"pad_token_id": 0},
    "glm4": {"head_dim": 32, "pad_token_id": 0},
    "gpt_neox": {},
    "ernie4_5": {"head_dim": 32},
    "gpt_oss": {
        "head_dim": 32,
        "sliding_window": 24,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "llama4_text": {
        "head_dim": 32,
        "attention_chunk_size": 24,
        "floor_scale": 16,
        "attn_scale": 0.5,
        "intermediate_size_mlp": 128,
        "num_local_experts": 4,
        "interleave_moe_layer_step": 2,
    },
}
"""Architectures that kvgraft is tested with, and what their configuration needs beyond the common sizes."""

ROPE_TYPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 256},
}
"""RoPE parameters that may be shifted."""


def tiny_model(
    family: str = "llama", *, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: object
) -> PreTrainedModel:
    """Build a 4-layer decoder of `family` with seeded random weights; `overrides` go to its configuration."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = AutoConfig.for_model(family, **(sizes | FAMILIES.get(family, {}) | overrides))
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):  # near 0 they would hardly show
            torch.nn.init.normal_(parameter, mean=1.0, std=2.0)
    model.eval()
    return model
