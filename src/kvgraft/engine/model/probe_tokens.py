"""Tokens of the prompts that a self-check runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvgraft.engine.model.loading import embedding_size

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvgraft.types import TokenArray


def probe_tokens(model: PreTrainedModel, count: int, seed: int = 7) -> TokenArray:
    """Return int64 (count,) of the model's vocabulary, always the same."""
    vocabulary = embedding_size(model)
    return np.random.default_rng(seed).integers(min(3, vocabulary - 1), vocabulary, count, dtype=np.int64)
