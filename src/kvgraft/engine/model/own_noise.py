"""How far a model is from itself when its prompt is cut in pieces: rounding, which no proof can be closer than.

Random gated delta nets with experts differ from themselves by 2e-4 and more in float32, trained models and other families
by 1e-5 or less.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvgraft.model_cache import cache_argument, cache_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor
    from transformers import PreTrainedModel

    from kvgraft.types import TokenArray

logger = logging.getLogger(__name__)

MOST_NOISE = 1e-3
"""More than this is no rounding in float32: some models lose their state when transformers hands them several rows."""


@torch.inference_mode()
def own_noise(model: PreTrainedModel, cut_prompts: Iterable[tuple[TokenArray, Sequence[int]]]) -> float:
    """Return the largest logit difference of the model's own forward to itself, relative to the largest logit.

    Args:
        model: With transformers' own attention and mixers.
        cut_prompts: Prompts, and the positions before which each is cut; ascending.

    Returns:
        Over all rows of all prompts; infinite where the model fails at a prompt in pieces.
    """
    try:
        return max(_difference(model, *cut_prompt) for cut_prompt in cut_prompts)
    except Exception:
        logger.exception("the model's own forward pass fails at a prompt in pieces")
        return math.inf


def _difference(model: PreTrainedModel, token_ids: TokenArray, cuts: Sequence[int]) -> float:
    whole = model(input_ids=_batch(model, token_ids), use_cache=False).logits[0].float()
    pieces: list[Tensor] = []
    cache = None
    for piece in np.split(token_ids, list(cuts)):
        output = model(input_ids=_batch(model, piece), use_cache=True, **cache_argument(model, cache))
        cache = cache_of(output)
        pieces.append(output.logits[0].float())
    difference = float((torch.cat(pieces) - whole).abs().max() / whole.abs().max())
    return math.inf if math.isnan(difference) else difference


def _batch(model: PreTrainedModel, token_ids: TokenArray) -> Tensor:
    return torch.from_numpy(token_ids).to(model.device)[None]
