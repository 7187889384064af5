"""The layers of a model one by one, for policies that look at the first ones. Loaded where such a policy runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvgraft.errors import IntegrationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from kvgraft.integrations.vllm.worker.layers import LayerGroup


@dataclass(frozen=True, slots=True, eq=False)
class DecoderStack:
    """The layers of a model one by one, for policies that look at the first ones.

    `body` owns the layers and embeds tokens; layers are called as `layer(positions, hidden, residual)`, as those of Llama,
    Qwen and Gemma models are.
    """

    body: nn.Module
    layers: nn.ModuleList

    @classmethod
    def of(cls, model: nn.Module, groups: Sequence[LayerGroup]) -> DecoderStack:
        """Find the stack with one attention layer in each entry.

        Raises:
            IntegrationError: There is none.
        """
        attention = {id(layer.module) for group in groups for layer in group.layers}
        for body in model.modules():
            layers = getattr(body, "layers", None)
            if (
                isinstance(layers, torch.nn.ModuleList)
                and len(layers) == len(attention)
                and hasattr(body, "embed_input_ids")
            ):
                found = [sum(id(part) in attention for part in layer.modules()) for layer in layers]
                if all(count == 1 for count in found):
                    return cls(body, layers)
        raise IntegrationError(
            "selection 'kv_deviation' runs decoder layers one by one and does not know this model; use 'first_k'"
        )

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the hidden states that enter the first layer; a collective operation where ranks share the vocabulary."""
        hidden: Tensor = self.body.embed_input_ids(token_ids)  # type: ignore[operator]
        return hidden

    def run(
        self, positions: Tensor, hidden: Tensor, residual: Tensor | None, first: int, stop: int
    ) -> tuple[Tensor, Tensor | None]:
        """Run layers `[first, stop)`; to be called within `RankModel.batch`."""
        for layer in self.layers[first:stop]:
            hidden, residual = layer(positions, hidden, residual)
        return hidden, residual
