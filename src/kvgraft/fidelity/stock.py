"""What a model says by its own forward pass: the reference that nothing of kvgraft has a hand in.

A reference that comes out of the engine under measurement can agree with it for the wrong reason, for instance because both
read the same cached K/V. This one keeps nothing between calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

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
    tokens = [int(output.logits[0, -1].argmax())]
    while len(tokens) < num_tokens:
        newest = given.new_tensor([[tokens[-1]]])
        output = model(newest, past_key_values=output.past_key_values, use_cache=True)
        tokens.append(int(output.logits[0, -1].argmax()))
    whole = torch.cat([given, given.new_tensor([tokens[:-1]])], dim=1)
    logits = model(whole, use_cache=False, logits_to_keep=num_tokens).logits[0].float()
    return StockAnswer(np.asarray(tokens, np.int64), logits)
