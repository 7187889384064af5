"""Number of floating-point operations that a set of prompt positions costs; the yardstick for speed-ups and plans.

`2 P` per token for the linear layers and `4 n_h d_h` per layer, token and visible key for attention
(the formulas of https://arxiv.org/abs/2001.08361, appendix B, without the embedding). A recurrent state costs 6 per token and
element at any position: it decays, takes the token in and is read, each a product and a sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from kvgraft.engine.model.layers import ModelLayers
    from kvgraft.graft.drift import DriftCorrection

_PER_STATE_ELEMENT = 6.0


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """Operations of one forward pass.

    Attributes:
        per_token: Of the linear layers and the states, for one token (experts of a mixture that a token does not visit are
            counted too).
        per_visible_key: Of attention in all layers, for one token and one key that it sees.
        num_layers: Attention layers of the model.
        kv_width: Numbers that one token keeps in one layer, keys and values together.
    """

    per_token: float
    per_visible_key: float
    num_layers: int = 1
    kv_width: int = 0

    @classmethod
    def of_model(cls, model: PreTrainedModel, layers: ModelLayers) -> ModelFlops:
        """Count the parameters of all matrices but the embedding and the output projection."""
        embeddings = {id(model.get_input_embeddings().weight)}
        if model.get_output_embeddings() is not None:
            embeddings.add(id(model.get_output_embeddings().weight))
        matrices = sum(p.numel() for p in model.parameters() if p.ndim >= 2 and id(p) not in embeddings)
        config = model.config.get_text_config(decoder=True)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        num_layers = len(layers.shapes)
        return cls(
            2.0 * matrices + _PER_STATE_ELEMENT * layers.num_recurrent_elements,
            4.0 * config.num_attention_heads * head_dim * num_layers,
            num_layers,
            2 * (getattr(config, "num_key_value_heads", None) or config.num_attention_heads) * head_dim,
        )

    def of_positions(self, positions: NDArray[np.int64]) -> float:
        """Operations to compute `positions` of one sequence, each seeing all positions up to its own."""
        return self.per_token * len(positions) + self.per_visible_key * float((positions + 1).sum())

    def of_range(self, start: int, stop: int) -> float:
        """Operations to compute the positions `[start, stop)` of one sequence; O(1)."""
        count = stop - start
        return self.per_token * count + self.per_visible_key * (count * (start + stop + 1) / 2)

    def of_look(self, positions: NDArray[np.int64], layer: int) -> float:
        """Operations to compute `positions` in the layers before `layer`; the keys of `layer` itself are not counted."""
        return self.of_positions(positions) * layer / self.num_layers

    def of_correction(self, correction: DriftCorrection, work: Sequence[tuple[int, int]]) -> float:
        """Operations to correct runs of that many sampled and remaining tokens in all layers that drift."""
        layers = self.num_layers - correction.first_layer
        return layers * sum(correction.estimator.operations(*sizes, self.kv_width) for sizes in work)

    def by_position(self, positions: NDArray[np.int64]) -> NDArray[np.float64]:
        """Operations of each of `positions`, float64."""
        return np.asarray(self.per_token + self.per_visible_key * (positions + 1.0), np.float64)
