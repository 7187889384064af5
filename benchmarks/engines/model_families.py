"""Tiny random models of the architectures that people serve: two layers of each kind, weights that make context matter."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

if TYPE_CHECKING:
    from pathlib import Path

VOCABULARY = 1024
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
_ROUTED: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
}
_EXPERTS: dict[str, Any] = {
    **_ROUTED,
    "n_routed_experts": 4,
    "shared_expert_intermediate_size": 128,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT: dict[str, Any] = {
    **_EXPERTS,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "head_dim": 64,
    "first_k_dense_replace": 1,
}
"""The one size that vLLM's CPU kernel for latent attention has."""
_SIGMOID = {**_LATENT, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
_TIED = {"tie_word_embeddings": True}
_FULL, _WINDOW, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_MAMBA: dict[str, Any] = {"mamba_d_state": 16, "mamba_expand": 2, "mamba_d_conv": 4, "use_mamba_kernels": False}
_DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": [_LINEAR, _LINEAR, _LINEAR, _FULL],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture: the `model_type` of transformers, what its configuration has besides, and the type of its numbers."""

    model_type: str
    options: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"


def _windows(*, every: int = 2, **options: object) -> dict[str, Any]:
    """Layers of which each `every`-th sees all, the others a window of 128 tokens."""
    kinds = [_FULL if number % every == every - 1 else _WINDOW for number in range(2 * every)]
    return {"num_hidden_layers": len(kinds), "layer_types": kinds, "sliding_window": 128, **options}


FAMILIES = {
    "Llama 3": Family("llama"),
    "Llama 4": Family(
        "llama4_text", {**_EXPERTS, "num_experts_per_tok": 1, "num_hidden_layers": 4, "intermediate_size_mlp": 256}
    ),
    "Mistral": Family("mistral", {"sliding_window": None}),
    "Mixtral": Family("mixtral", _ROUTED),
    "Ministral 3": Family("ministral3"),
    "Qwen2.5": Family("qwen2"),
    "Qwen2-MoE": Family("qwen2_moe", _EXPERTS),
    "Qwen3": Family("qwen3"),
    "Qwen3-MoE": Family("qwen3_moe", _ROUTED),
    "Qwen3-Next": Family("qwen3_next", {**_EXPERTS, **_DELTA}, "bfloat16"),
    "Qwen3.5": Family("qwen3_5_text", _DELTA, "bfloat16"),
    "Gemma 1": Family("gemma", _TIED),
    "Gemma 2": Family("gemma2", {**_TIED, **_windows(query_pre_attn_scalar=32)}),
    "Gemma 3": Family("gemma3_text", {**_TIED, **_windows(query_pre_attn_scalar=32)}),
    "Gemma 3n": Family("gemma3n_text", {**_TIED, "num_kv_shared_layers": 0, **_windows()}),
    "Gemma 4": Family("gemma4_text", {**_TIED, **_windows(global_head_dim=32, hidden_size_per_layer_input=32)}),
    "Phi-2": Family("phi"),
    "Phi-3, Phi-4": Family("phi3"),
    "Phi-3.5-MoE": Family("phimoe", {**_ROUTED, "moe_intermediate_size": 256}),
    "DeepSeek V2": Family("deepseek_v2", _LATENT),
    "DeepSeek V3, R1": Family("deepseek_v3", _SIGMOID),
    "DeepSeek V3.2": Family("deepseek_v32", {**_LATENT, "index_topk": 64, "index_n_heads": 4, "index_head_dim": 64}),
    "Kimi K2": Family("deepseek_v3", {**_SIGMOID, "n_routed_experts": 8}),
    "Kimi Linear": Family("kimi_linear", _LATENT),
    "GLM-4 9B": Family("glm"),
    "GLM-4": Family("glm4"),
    "GLM-4.5, 4.6": Family("glm4_moe", {**_EXPERTS, "first_k_dense_replace": 1}),
    "GLM-4.7 Flash": Family("glm4_moe_lite", _LATENT),
    "GLM-5": Family("glm_moe_dsa", {**_LATENT, "index_topk": 64, "index_n_heads": 4, "index_head_dim": 64}),
    "gpt-oss": Family("gpt_oss", {**_ROUTED, **_windows()}),
    "MiniMax M1": Family("minimax", {**_ROUTED, "layer_types": [_LINEAR, _FULL]}),
    "MiniMax M2": Family("minimax_m2", _ROUTED),
    "Granite 3": Family("granite"),
    "Granite 3 MoE": Family("granitemoe", _ROUTED),
    "Granite 4": Family(
        "granitemoehybrid",
        {**_EXPERTS, **_MAMBA, "layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 32},
    ),
    "OLMo 2": Family("olmo2"),
    "OLMo 3": Family("olmo3", _windows()),
    "OLMoE": Family("olmoe", _ROUTED),
    "Nemotron": Family("nemotron"),
    "Nemotron-H": Family(
        "nemotron_h",
        {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 16},
    ),
    "Falcon 3": Family("llama", {"rope_theta": 1_000_042.0}),
    "Falcon-H1": Family("falcon_h1", {**_MAMBA, "mamba_d_ssm": 256, "mamba_n_heads": 8, "mamba_d_head": 32}),
    "LFM2": Family("lfm2", {"layer_types": ["conv", _FULL]}),
    "Command R": Family("cohere"),
    "Command A": Family("cohere2", _windows()),
    "ERNIE 4.5": Family("ernie4_5"),
    "ERNIE 4.5 MoE": Family("ernie4_5_moe", {**_EXPERTS, "moe_num_experts": 4, "moe_k": 2}),
    "Hunyuan": Family("hunyuan_v1_dense"),
    "Hunyuan A13B": Family("hunyuan_v1_moe", {**_EXPERTS, "moe_topk": 2}),
    "EXAONE 4": Family("exaone4", _windows(sliding_window_pattern="LG")),
    "SmolLM3": Family("smollm3"),
    "Seed-OSS": Family("seed_oss"),
    "StarCoder2": Family("starcoder2", {"sliding_window": None}),
    "Apertus": Family("apertus"),
    "StableLM 2": Family("stablelm"),
    "Jamba": Family(
        "jamba", {**_EXPERTS, **_MAMBA, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8}
    ),
    "Bamba": Family("bamba", {**_MAMBA, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 32}),
    "GPT-2": Family("gpt2", {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 4096}),
}


def write_model(name: str, folder: Path) -> None:
    """Write a family's model and configuration into `folder`."""
    family = FAMILIES[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(family.model_type, **{**_SHAPE, **family.options})
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, family.dtype))
    with torch.no_grad():
        for parameter, weight in model.named_parameters():
            if weight.ndim > 1 and not any(part in parameter for part in ("embed", "conv", "A_log")):
                weight.normal_(0.0, 0.06)  # as initialised attention hardly matters, and some experts are not at all
    model.save_pretrained(folder)
    path = folder / "config.json"
    saved = json.loads(path.read_text())
    path.write_text(json.dumps({**saved, "architectures": [type(model).__name__]}))
