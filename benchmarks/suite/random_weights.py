"""A stand-in for a model at lengths that it was not made for: the same shape, random weights, a longer context.

Times of a forward pass do not depend on what the weights are; nothing can be said about answers.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM

from kvgraft.engine.model.loading import LoadedModel, adopt_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def lengthened(loaded: LoadedModel, context: int, seed: int) -> LoadedModel:
    """Return a model of the same shape and number format with random weights that takes `context` tokens."""
    config = copy.deepcopy(loaded.model.config)
    config.max_position_embeddings = context
    weight = next(loaded.model.parameters())
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=weight.dtype, attn_implementation="eager"
        )
    torch.nn.Module.to(model, weight.device)
    return adopt_model(f"{loaded.name}, random weights", model.eval(), loaded.tokenizer)
