"""Recorded sessions of agent clients: packs of token ids, what any method computes of them, a model that serves them."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.bench.bound import covered_positions
from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from transformers import LlamaForCausalLM

    Prompt = NDArray[np.int64]

RUN = 16
"""Shortest run of known tokens that the bound counts: the shortest that kvgraft finds."""
POSITIONS = 65_536
"""Of the model; the longest prompts of the packs have 36,000 tokens."""
_VOCABULARY = 49_152


def read_pack(path: Path, limit: int = 0) -> list[Prompt]:
    """Return the prompts of a pack, int64 each, the first `limit` of them; all for 0.

    Raises:
        ConfigError: A line is no call.
    """
    prompts: list[Prompt] = []
    previous: Prompt = np.empty(0, np.int64)
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                call = json.loads(line)
                previous = np.concatenate([previous[: call["after"]], np.asarray(call["tokens"], np.int64)])
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{path}:{number} is no call of an agent ({error!r}); correct the pack") from error
            prompts.append(previous)
            if len(prompts) == limit:
                break
    return prompts


def bound_of(before: Sequence[Prompt], prompts: Sequence[Prompt]) -> int:
    """Return the tokens of `prompts` that lie in no run of `RUN` tokens that was asked for: any method computes them."""
    covered = covered_positions([prompt.astype(np.int32) for prompt in (*before, *prompts)], RUN)[len(before) :]
    return sum(int((~each).sum()) for each in covered)


def two_random_layers(seed: int) -> LlamaForCausalLM:
    """Return a small model, float32, that takes the longest prompts: what is counted depends on no weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: LlamaForCausalLM = LlamaForCausalLM(config).eval()
    return model
