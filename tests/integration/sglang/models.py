"""Tiny models with random weights whose greedy output varies, written once per test session."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import transformers

if TYPE_CHECKING:
    from pathlib import Path

VOCABULARY = 2048
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
_29M = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 32768,
}
"""Large enough for prefill to take longer than everything else; for benchmarks."""
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**_SHAPE),
    "llama-trained-on": lambda: transformers.LlamaConfig(**_SHAPE),
    "llama3": lambda: transformers.LlamaConfig(**_SHAPE, rope_parameters=_LLAMA3),
    "qwen2": lambda: transformers.Qwen2Config(**{k: v for k, v in _SHAPE.items() if k != "head_dim"}),
    "qwen3": lambda: transformers.Qwen3Config(**_SHAPE),
    "mistral": lambda: transformers.MistralConfig(**_SHAPE, sliding_window=None),
    "llama-1-layer": lambda: transformers.LlamaConfig(**_SHAPE | {"num_hidden_layers": 1}),
    "llama-29m": lambda: transformers.LlamaConfig(**_SHAPE | _29M),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **_SHAPE, sliding_window=64, layer_types=["sliding_attention", "full_attention"] * 2
    ),
    "lfm2": lambda: transformers.Lfm2Config(**_SHAPE, layer_types=["conv", "full_attention"] * 2),
}


def write_model(name: str, folder: Path) -> str:
    """Write the model called `name` in float32 and return its directory."""
    path = folder / name
    if not (path / "config.json").exists():
        torch.manual_seed(2 if name.endswith("trained-on") else 1)
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).to(torch.float32)
        for parameter_name, weight in model.named_parameters():
            if weight.dim() == 2:
                torch.nn.init.normal_(weight, std=0.06 if "embed" in parameter_name else 0.09)
        model.save_pretrained(path)
    return str(path)
