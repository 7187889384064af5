"""Tiny random-weight models that vLLM's CPU backend can run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import transformers as tf

if TYPE_CHECKING:
    from pathlib import Path

VOCABULARY = 1024
WINDOW = 128

_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


def _gemma3() -> tf.PreTrainedModel:
    shape = {**_SHAPE, "head_dim": 32, "sliding_window": WINDOW, "num_hidden_layers": 6, "query_pre_attn_scalar": 32}
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    return tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**shape, layer_types=kinds))


def _jamba() -> tf.PreTrainedModel:
    """Every other layer is a Mamba mixer."""
    mixers = {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 16,
        "mamba_expand": 2,
        "mamba_dt_rank": 8,
    }
    experts = {"num_experts": 1, "num_experts_per_tok": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
    return tf.JambaForCausalLM(tf.JambaConfig(**_SHAPE, **mixers, **experts, use_mamba_kernels=False))


def _gpt_oss() -> tf.PreTrainedModel:
    """Every head has an attention sink, and every other layer a window."""
    kinds = ["sliding_attention", "full_attention"] * 2
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 2048}
    rope |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    shape = {**_SHAPE, "head_dim": 32, "sliding_window": WINDOW, "layer_types": kinds, "rope_parameters": rope}
    shape["tie_word_embeddings"] = False  # vLLM's model has a head of its own: left out, it is uninitialised memory
    model = tf.GptOssForCausalLM(tf.GptOssConfig(**shape, **experts))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("sinks"):
                weight.normal_(0.0, 2.0)
    return model


SINKS = {"gpt-oss": _gpt_oss}
"""What the query attends to cannot be seen in these."""

FAMILIES = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_SHAPE, head_dim=32)),
    "qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**_SHAPE)),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**_SHAPE, head_dim=32)),
    "gemma3": _gemma3,
    # vLLM has no model of its own for it: it runs that of transformers, whose layers call attention by other ways.
    "olmo2": lambda: tf.Olmo2ForCausalLM(tf.Olmo2Config(**_SHAPE)),
}

HYBRIDS = {"jamba": _jamba}
"""Nothing is grafted for these."""

ONE_LAYER = {
    "llama-1-layer": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_SHAPE | {"num_hidden_layers": 1}, head_dim=32))
}
"""Its K/V follow from token and position alone: whatever was moved, the answer is a full prefill's."""


def save_tiny(family: str, folder: Path) -> str:
    """Write a float32 model whose answers depend on its context; returns the path."""
    path = folder / family
    if not (path / "config.json").exists():
        torch.manual_seed(0)
        model = {**FAMILIES, **HYBRIDS, **ONE_LAYER, **SINKS}[family]()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                # Default initialisation is so small that attention hardly matters; errors would hide.
                if weight.ndim == 2 and "embed" not in name:
                    weight.mul_(3.0)
        model.to(torch.float32).save_pretrained(path)
    return str(path)
