"""How far a model is from itself: rounding, which no proof can be closer than.

In float32 that is what cutting its prompt in pieces changes: 2e-4 and more in random gated delta nets with experts, 1e-5 or
less in trained models and other families. In half precision it is what computing in float32 changes: 1.5 % of the largest
logit in SmolLM2-135M, 6 % in Qwen2.5-Coder-1.5B (bfloat16, a CPU), where cutting changes nothing.
"""

from __future__ import annotations

import logging
import math
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvgraft.graft.rope_proof import relative_error
from kvgraft.model_cache import cache_argument, cache_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from kvgraft.types import TokenArray

logger = logging.getLogger(__name__)

MOST_NOISE = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.2}
"""More than this is no rounding: some models lose their state when transformers hands them several rows, and one that is a
fifth off float32 is not made for its precision."""


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


@torch.no_grad()
def own_rounding(model: PreTrainedModel, token_ids: TokenArray) -> float:
    """Return how much the last logits of a prompt change where the model is computed in float32, relative to the largest.

    Weights are widened one module at a time, in copies: memory is that of the largest module twice. Infinite where the model
    fails in float32.
    """
    own = model(input_ids=_batch(model, token_ids), use_cache=False).logits[0, -1]
    try:
        with _widened(model):
            wide = model(input_ids=_batch(model, token_ids), use_cache=False).logits[0, -1]
    except Exception:
        logger.exception("the model's own forward pass fails in float32")
        return math.inf
    return relative_error(own, wide)


@contextmanager
def _widened(model: PreTrainedModel) -> Iterator[None]:
    """Give each module's own weights in float32 to its forward pass, and the weights themselves back after it."""
    narrow: dict[nn.Module, list[tuple[nn.Parameter, Tensor]]] = {}

    def widen(module: nn.Module, *_: object) -> None:
        narrow[module] = [
            (weight, weight.data) for weight in module.parameters(recurse=False) if weight.is_floating_point()
        ]
        for weight, data in narrow[module]:
            weight.data = data.float()

    def give_back(module: nn.Module, *_: object) -> None:
        for weight, data in narrow.pop(module, ()):
            weight.data = data

    hooks = []
    for module in model.modules():
        hooks += [module.register_forward_pre_hook(widen), module.register_forward_hook(give_back)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module in reversed(list(narrow)):  # those whose forward pass failed, the innermost first
            give_back(module)


def _difference(model: PreTrainedModel, token_ids: TokenArray, cuts: Sequence[int]) -> float:
    whole = model(input_ids=_batch(model, token_ids), use_cache=False).logits[0]
    pieces: list[Tensor] = []
    cache = None
    for piece in np.split(token_ids, list(cuts)):
        output = model(input_ids=_batch(model, piece), use_cache=True, **cache_argument(model, cache))
        cache = cache_of(output)
        pieces.append(output.logits[0])
    return relative_error(torch.cat(pieces), whole)


def _batch(model: PreTrainedModel, token_ids: TokenArray) -> Tensor:
    return torch.from_numpy(token_ids).to(model.device)[None]
