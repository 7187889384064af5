"""Compare the states that an engine keeps with those of a cold run: the oracle of exact prefixes of models with states."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvgraft.engine.model.adapter import TransformersAdapter
from kvgraft.graft.model import SequenceRows
from kvgraft.prefix import RadixKey, StateMatchResult

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from kvgraft.engine.kv.kv_space import KVSpace
    from kvgraft.types import Namespace, TokenArray

TOLERANCE = 1e-3
"""Largest difference in float32, relative to the largest magnitude of the tensor: of texts in pieces of a few rows, rounding
leaves up to 2e-4. One token of 120 that a state has not read changes it by 9e-3 at least."""


STATE_MODELS = ("qwen3_next", "granitemoehybrid", "falcon_h1", "lfm2", "bamba")
"""Gated delta rule, Mamba 2 alone, beside attention in every layer, short convolutions, Mamba 2 with RoPE attention."""


class ColdRuns:
    """Computes texts from their first token in slots of its own, in one piece."""

    def __init__(self, model: PreTrainedModel, num_slots: int) -> None:
        self.adapter = TransformersAdapter.create(model, num_slots=num_slots, num_states=1)

    def run(self, token_ids: TokenArray) -> None:
        """Leave the K/V of a text in the first slots, and its state in the first state."""
        assert self.adapter.states is not None
        self.adapter.states.clear(0)
        positions = np.arange(len(token_ids))
        self.adapter.forward([SequenceRows(token_ids, positions, positions, state=0)])

    def assert_prefix_is_exact(
        self, adapter: TransformersAdapter, space: KVSpace, namespace: Namespace, token_ids: TokenArray
    ) -> int:
        """Assert that what is stored of a text's beginning is what a cold run leaves; returns its length."""
        match = space.match(RadixKey(token_ids, namespace.key))
        assert isinstance(match, StateMatchResult)
        length = match.prefix_len
        if match.state is None:
            assert not length
            return 0
        self.run(token_ids[:length])
        assert adapter.states is not None
        assert self.adapter.states is not None
        stored, cold = adapter.states.export(match.state), self.adapter.states.export(0)
        assert stored.num_tokens == cold.num_tokens == length
        for number, (found, due) in enumerate(zip(stored.parts, cold.parts, strict=True)):
            assert_close(found, due, f"part {number} of the state after {length} tokens")
        own, other = adapter.pool.place(match.kv_indices), self.adapter.pool.place(np.arange(length))
        for layer in range(adapter.num_layers):
            for found, due in zip(own.read(layer), other.read(layer), strict=True):
                assert_close(found, due, f"layer {layer} of a stored prefix of {length} tokens")
        return length


def assert_close(found: torch.Tensor, due: torch.Tensor, what: str = "") -> None:
    """Assert that two tensors differ by no more than rounding explains."""
    error = float((found.float() - due.float()).abs().max()) if due.numel() else 0.0
    assert error <= TOLERANCE * float(due.abs().max().clamp_min(1e-6)), f"{what}: {error}"
