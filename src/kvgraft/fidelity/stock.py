"""A model's own forward pass: the reference in which nothing of kvgraft takes part.

A reference that comes out of the engine under measurement can agree with it for the wrong reason, for instance because both
read the same cached K/V. This one keeps nothing between calls.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvgraft.model_cache import cache_argument, cache_of

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import Cache, PreTrainedModel

    from kvgraft.types import TokenArray


@dataclass(frozen=True, slots=True, eq=False)
class StockAnswer:
    """A greedy continuation.

    Attributes:
        token_ids: int64 (num_tokens,).
        logits: float32 (num_tokens, vocab_size); row i predicts `token_ids[i]`.
    """

    token_ids: TokenArray
    logits: Tensor


@torch.inference_mode()
def stock_answer(model: PreTrainedModel, prompt: TokenArray, num_tokens: int) -> StockAnswer:
    """Continue `prompt` greedily by `num_tokens` tokens.

    The tokens come from transformers' own decoding; the logits from one more forward pass over prompt and continuation that
    reads and keeps no K/V at all.

    Args:
        model: With an attention of transformers' own; see `TransformersAdapter.stock`.
        prompt: Token ids.
        num_tokens: At least 1; the end-of-text token does not end it.
    """
    given = torch.from_numpy(prompt)[None].to(model.device)
    output = model(given, use_cache=True, logits_to_keep=1)
    tokens, past = [int(output.logits[0, -1].argmax())], cache_of(output)
    while len(tokens) < num_tokens:
        (logits,) = _feed(model, np.asarray(tokens[-1:]), past, len(prompt) + len(tokens) - 1)
        tokens.append(int(logits[-1].argmax()))
    token_ids = np.asarray(tokens, np.int64)
    return StockAnswer(token_ids, stock_logits(model, prompt, token_ids))


@dataclass(frozen=True, slots=True, eq=False)
class StockReference(StockAnswer):
    """A greedy continuation and the logits of a given answer after the same prompt.

    Attributes:
        gold_logits: float32 (len(gold), vocab_size); row i predicts `gold[i]`.
    """

    gold_logits: Tensor


@torch.inference_mode()
def stock_reference(model: PreTrainedModel, prompt: TokenArray, num_tokens: int, gold: TokenArray) -> StockReference:
    """Continue `prompt` greedily, and score `gold` after it, from one prefill in transformers' own K/V cache.

    Cheaper than `stock_answer` by one forward pass over the prompt; nothing of kvgraft has a hand in this cache either.

    Args:
        model: With an attention of transformers' own; see `TransformersAdapter.stock`.
        prompt: Token ids.
        num_tokens: At least 1; the end-of-text token does not end it.
        gold: Token ids of an answer, maybe none.
    """
    output = model(torch.from_numpy(prompt)[None].to(model.device), use_cache=True, logits_to_keep=1)
    first = output.logits[0]
    gold_logits = first[:0]
    if len(gold):
        # The cache grows in place, and window layers forget: the answer gets a copy.
        rest = _feed(model, gold[:-1], copy.deepcopy(cache_of(output)), len(prompt))
        gold_logits = torch.cat([first, *rest])
    rows, tokens, past = [first], [int(first.argmax())], cache_of(output)
    while len(tokens) < num_tokens:
        rows += _feed(model, np.asarray(tokens[-1:]), past, len(prompt) + len(tokens) - 1)
        tokens.append(int(rows[-1].argmax()))
    return StockReference(np.asarray(tokens, np.int64), torch.cat(rows).float(), gold_logits.float())


@torch.inference_mode()
def stock_logits(model: PreTrainedModel, prompt: TokenArray, continuation: TokenArray) -> Tensor:
    """Return float32 (len(continuation), vocab_size) of a given continuation, from one pass without any cache."""
    whole = torch.from_numpy(np.concatenate([prompt, continuation[:-1]]))[None].to(model.device)
    logits: Tensor = model(whole, use_cache=False, logits_to_keep=len(continuation)).logits[0]
    return logits.float()


def _feed(model: PreTrainedModel, token_ids: TokenArray, past: Cache, start: int) -> list[Tensor]:
    """Logits (len(token_ids), vocab_size) after `token_ids` from position `start` on, a list of none or one; `past` grows."""
    if not len(token_ids):
        return []
    given = torch.from_numpy(token_ids)[None].to(model.device)
    # Said, because some models (Bamba) count from 0 in every pass by themselves.
    places = torch.arange(start, start + len(token_ids), device=model.device)[None]
    return [model(given, position_ids=places, use_cache=True, **cache_argument(model, past)).logits[0]]
