"""Models with RoPE angles that depend on how long a sequence is, and what follows for reuse and batching.

transformers chooses the angles of a forward pass by the highest position in it, of any of its sequences:

- LongRoPE (Phi-3) has two tables and takes the second one for sequences of more than `original_max_position_embeddings`
  tokens. K/V of the two are not interchangeable: each has a namespace of its own and passes of its own, and a request that
  outgrows the first table is computed again with the second, as Phi-3's `generate` does.
- Dynamic NTK has another table for every length above `max_position_embeddings`, and `generate` mixes them in one sequence.
  Nothing can be shared there, so sequences end at that length.

The self-check asks the model whether that is all: see `check_lengths`.
Source: https://arxiv.org/abs/2402.13753 (LongRoPE), `modeling_rope_utils.dynamic_rope_update` of transformers 5.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvgraft.errors import ConfigError, ModelError
from kvgraft.graft.rope_proof import relative_error

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

    from kvgraft.types import Namespace


@dataclass(frozen=True, slots=True)
class RopeLengths:
    """At which lengths a model's angles change.

    Attributes:
        switch: Sequences of more tokens than this have the second table; None if there is one table.
        limit: Longest sequence that can be served; None if there is none.
    """

    switch: int | None = None
    limit: int | None = None

    @classmethod
    def of_model(cls, config: PretrainedConfig) -> RopeLengths:
        """Read them off the configuration of a decoder.

        Raises:
            ModelError: Layers switch at different lengths.
        """
        switches, limit = set(), None
        for part in _rope_parts(config):
            rope_type = part.get("rope_type", part.get("type"))
            if rope_type == "longrope":
                switches.add(part.get("original_max_position_embeddings"))
            elif rope_type == "dynamic":
                limit = int(config.max_position_embeddings)
        if not switches:
            return cls(None, limit)
        switch = switches.pop()
        if switches or not isinstance(switch, int):
            raise ModelError(
                "LongRoPE needs one original_max_position_embeddings for all layers; choose another model or correct its "
                "config.json"
            )
        return cls(switch, limit)

    def is_long(self, num_tokens: int) -> bool:
        """Return whether a sequence of `num_tokens` has the second table."""
        return self.switch is not None and num_tokens > self.switch

    def namespace(self, namespace: Namespace, num_tokens: int) -> Namespace:
        """Return a key of the K/V that a sequence of `num_tokens` may share: those of the same table only."""
        if not self.is_long(num_tokens):
            return namespace
        return replace(namespace, model_fingerprint=f"{namespace.model_fingerprint}, long RoPE table")

    def require(self, max_model_len: int) -> None:
        """Raise `ConfigError` if sequences of `max_model_len` tokens cannot be served."""
        if self.limit is not None and max_model_len > self.limit:
            raise ConfigError(
                f"max_model_len is {max_model_len} and this model's dynamic RoPE has other angles for every length above "
                f"{self.limit}; set max_model_len to {self.limit} or less"
            )


def check_lengths(
    model: PreTrainedModel, token_ids: np.ndarray, lengths: RopeLengths, longest: int, tolerance: float
) -> Tensor | None:
    """Prove that one request's length changes another's angles nowhere but at `lengths.switch`.

    Computes a short text beside one row at a far position, with the model's own attention; causally it cannot see that row.

    Args:
        model: With transformers' own attention.
        token_ids: The text, int64; shorter than `lengths.switch`.
        lengths: What the configuration says.
        longest: Tokens of the longest sequence that is to be served.
        tolerance: Largest accepted relative difference of logits.

    Returns:
        Logits (vocab_size,) after the text under the second table, None if there is one table.

    Raises:
        ModelError: A far row changes the text's logits where it must not.
    """
    expected: dict[bool, Tensor] = {}
    for position in _probed_positions(len(token_ids), lengths, longest):
        logits = _logits_beside(model, token_ids, position)
        reference = expected.setdefault(lengths.is_long(position + 1), logits)
        if not relative_error(logits, reference) <= tolerance:
            raise ModelError(
                f"self-check failed: a token at position {position} changes the answer to a text beside it, so this model's "
                "angles depend on the length of a pass in a way that kvgraft does not know; lower max_model_len"
            )
    return expected.get(True)


def _probed_positions(num_tokens: int, lengths: RopeLengths, longest: int) -> list[int]:
    """The text's own end, both sides of the switch, and the end of the longest sequence."""
    switch = longest if lengths.switch is None else lengths.switch
    candidates = {num_tokens - 1, switch - 1, switch, longest - 1}
    return sorted(position for position in candidates if num_tokens - 1 <= position < longest)


@torch.inference_mode()
def _logits_beside(model: PreTrainedModel, token_ids: np.ndarray, position: int) -> Tensor:
    """Return logits after a text that shares its pass with a row at `position`; with none if that is the text's last."""
    num_tokens = len(token_ids)
    positions = np.arange(num_tokens)
    if position >= num_tokens:
        token_ids, positions = np.append(token_ids, token_ids[-1]), np.append(positions, position)
    try:
        output = model(
            input_ids=torch.from_numpy(token_ids).to(model.device)[None],
            position_ids=torch.from_numpy(positions).to(model.device)[None],
            use_cache=False,
        )
    except (IndexError, RuntimeError) as error:
        raise ModelError(
            f"the model fails at position {position} ({type(error).__name__}); set max_model_len to what it was made for"
        ) from error
    logits: Tensor = output.logits[0, num_tokens - 1].float()
    return logits


def _rope_parts(config: PretrainedConfig) -> Iterator[dict[str, object]]:
    """RoPE parameters of all kinds of layers; some configurations nest them by layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    yield from nested or [parameters]
