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
    "gemma3_text": {"head_dim": 32, "sliding_window": 24, "num_hidden_layers": 4},
    "phi3": {"pad_token_id": 0},
    "olmo2": {},
    "cohere": {},
    "cohere2": {"sliding_window": 24, "num_hidden_layers": 4},
    "granite": {},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"head_dim": 32, "num_experts": 8, "moe_intermediate_size": 64, "num_experts_per_tok": 2},
    "smollm3": {"pad_token_id": 0, "num_hidden_layers": 4},
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
        "num_hidden_layers": 4,
        "attention_chunk_size": 24,
        "floor_scale": 16,
        "attn_scale": 0.5,
        "intermediate_size_mlp": 128,
        "num_local_experts": 4,
        "interleave_moe_layer_step": 2,
    },
}
"""Architectures that kvgraft is tested with, and what their configuration needs beyond the common sizes."""

_ALTERNATING = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
_DELTA_NET: dict[str, Any] = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": _ALTERNATING,
}
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 32,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "moe_intermediate_size": 64, "num_experts_per_tok": 2}
_SHORT_CONVOLUTION = ["conv", "full_attention", "conv", "full_attention"]

STATE_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": _DELTA_NET | _EXPERTS | {"head_dim": 16, "shared_expert_intermediate_size": 64},
    "qwen3_5_text": _DELTA_NET | {"head_dim": 16},
    "olmo_hybrid": _DELTA_NET | {"linear_num_key_heads": 4, "linear_value_head_dim": 32, "pad_token_id": 0},
    "jamba": {"num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8},
    "bamba": _MAMBA2 | {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": _MAMBA2
    | {"layer_types": _ALTERNATING, "num_local_experts": 4, "shared_intermediate_size": 64, "pad_token_id": 0},
    "falcon_h1": _MAMBA2 | {"mamba_d_ssm": 128},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "moe", "mamba", "attention"],
        "head_dim": 16,
        "ssm_state_size": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "chunk_size": 32,
        "time_step_min": 1e-9,  # transformers holds prefill to it, and no decode step
        "n_routed_experts": 4,
        "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 64,
    },
    "lfm2": {"layer_types": _SHORT_CONVOLUTION},
    "lfm2_moe": _EXPERTS | {"layer_types": _SHORT_CONVOLUTION, "num_dense_layers": 1},
    "lfm3": {
        "head_dim": 16,
        "sliding_window": 24,
        "layer_types": ["conv", "sliding_attention", "conv", "full_attention"],
        "pad_token_id": 0,
    },
}
"""Architectures with layers that keep a state: gated delta net, Mamba, Mamba 2, short convolution."""

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
    """Build a decoder of `family` with 2 to 5 layers and seeded random weights; `overrides` go to its configuration."""
    # A test's time is that of layers, not of their width: few wide ones, so that a token costs enough to be worth a copy.
    num_layers, width = (2, 384) if family in FAMILIES else (4, 128)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": width,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if family in STATE_FAMILIES:
        sizes["initializer_range"] = 0.2  # with less, states hardly show
    if "layers_block_type" in STATE_FAMILIES.get(family, {}):
        del sizes["num_hidden_layers"]
    own = FAMILIES.get(family) or STATE_FAMILIES.get(family, {})
    config = AutoConfig.for_model(family, **(sizes | own | overrides))
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):  # near 0 they would hardly show
            torch.nn.init.normal_(parameter, mean=1.0, std=2.0)
    model.eval()
    return model
