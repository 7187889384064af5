"""Models to measure: random weights of a known shape, made on the device, or a model that is installed."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvgraft.engine.model.loading import DTYPES, LoadedModel, adopt_model, load_model
from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from .card import Card

SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "llama-toy": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 131_072,
    },
}
"""Llama's architecture with random weights: times do not depend on what the weights are, and nothing is downloaded."""

_SPARE = 1.1
"""Memory beside the weights: what making them takes, and a forward pass."""


def load_subject(name: str, dtype: str, card: Card, seed: int) -> LoadedModel:
    """Make the model `name` of `SHAPES`, or load what `--model` takes.

    Raises:
        ConfigError: It is not installed, or does not fit beside what lies on the device.
        ModelError: It cannot be loaded.
    """
    if name not in SHAPES:
        return load_model(name, dtype=dtype, device=str(card.device))
    config = AutoConfig.for_model("llama", bos_token_id=1, eos_token_id=2, **SHAPES[name])
    wanted, free = _weight_bytes(config, DTYPES[dtype]) * _SPARE, card.free_bytes
    if wanted > free:
        raise ConfigError(f"weights take {wanted / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free")
    return adopt_model(f"{name}, random weights", _random_model(config, DTYPES[dtype], card.device, seed), None)


def one_layer(loaded: LoadedModel, seed: int) -> LoadedModel:
    """Return a model of one layer of the same shape and random weights: its K/V depend on token and position alone."""
    model = loaded.model
    config = copy.deepcopy(model.config)
    text = config.get_text_config(decoder=True)
    text.num_hidden_layers = 1
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:1]
    made = _random_model(config, model.dtype, model.device, seed)
    return adopt_model(f"one layer of {loaded.name}", made, None)


def bytes_per_token(loaded: LoadedModel) -> int:
    """Return the bytes of one token's K/V in all layers by the configuration, where no engine has read them off the model."""
    text = loaded.model.config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * text.num_hidden_layers * heads * width * loaded.model.dtype.itemsize)


def weight_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of all weights that a decode step reads: the table of input embeddings is not among them."""
    read = {id(weight): weight.nbytes for weight in model.parameters()}
    head, table = model.get_output_embeddings(), model.get_input_embeddings().weight
    if head is None or head.weight is not table:
        del read[id(table)]
    return sum(read.values())


def _random_model(config: PretrainedConfig, dtype: torch.dtype, device: torch.device, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    model.eval()
    return model


def _weight_bytes(config: PretrainedConfig, dtype: torch.dtype) -> int:
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    return sum(weight.numel() for weight in model.parameters()) * dtype.itemsize
