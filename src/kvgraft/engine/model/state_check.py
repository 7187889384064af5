"""Proof of a model with states: two prompts in pieces, side by side, give the logits of the model's own forward.

The pieces are single rows and runs: shorter than a convolution reaches, and longer than the chunks in which such layers
compute. Their lengths are fixed, so every start proves the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvgraft.engine.model.probe_tokens import probe_tokens
from kvgraft.graft.model import SequenceRows

if TYPE_CHECKING:
    from torch import Tensor

    from kvgraft.engine.model.adapter import TransformersAdapter
    from kvgraft.memory.state_pool import StatePool
    from kvgraft.types import TokenArray

_HALF_SHARE = 0.9
"""Rows that must agree in half precision, where rounding alone sends single tokens to other experts: their logits differ by a
fifth then. A state that was lost shows in more rows."""
_SHORT = 90
_BESIDE_CHUNK = 86
STATE_CHECK_TOKENS = _SHORT + _BESIDE_CHUNK
"""Tokens of the two prompts without a chunk, by which one of them is longer; with fewer slots they are shorter."""
_SHORT_PIECES = (1, 1, 66, 3, 1, 7)
_LONG_PIECES = (40, 1, 1), (2, 1)
"""Rows of the passes; between those of the longer prompt is one of more than a chunk. What is left is one more piece."""


@dataclass(slots=True)
class _Prompt:
    """A prompt that is computed piece by piece."""

    token_ids: TokenArray
    kv_indices: np.ndarray
    state: int
    pieces: list[int]
    logits: list[Tensor]
    start: int = 0

    def next_rows(self) -> SequenceRows | None:
        """The next piece, None at the end."""
        stop = min(len(self.token_ids), self.start + (self.pieces.pop(0) if self.pieces else len(self.token_ids)))
        if stop == self.start:
            return None
        positions = np.arange(self.start, stop)
        self.start = stop
        return SequenceRows(
            self.token_ids[positions],
            positions,
            self.kv_indices,
            num_logits=len(positions),
            swa_indices=self.kv_indices,
            state=self.state,
        )


def state_error(adapter: TransformersAdapter, states: StatePool, kv_indices: np.ndarray) -> float:
    """Largest logit difference to the model's own forward, relative to the largest logit, over all rows.

    In half precision over nine in ten of each prompt's.

    Args:
        adapter: The model.
        states: Of the adapter; the first two are taken, and cleared in the end.
        kv_indices: Slots of every space, at least 64. With fewer than `STATE_CHECK_TOKENS` and a chunk the
            prompts are shorter.
    """
    prompts = _prompts(adapter, kv_indices)
    expected = _own_logits(adapter, prompts)
    for prompt in prompts:
        states.clear(prompt.state)
    while batch := [(prompt, rows) for prompt in prompts if (rows := prompt.next_rows()) is not None]:
        outputs = adapter.forward([rows for _, rows in batch])
        for (prompt, _), output in zip(batch, outputs, strict=True):
            prompt.logits.append(output.logits)
    for prompt in prompts:
        states.clear(prompt.state)
    share = 1.0 if adapter.model.dtype == torch.float32 else _HALF_SHARE
    return max(_error(torch.cat(prompt.logits), own, share) for prompt, own in zip(prompts, expected, strict=True))


def cut_prompts(adapter: TransformersAdapter, kv_indices: np.ndarray) -> list[tuple[TokenArray, list[int]]]:
    """Return the prompts of `state_error`, and the positions before which it cuts them."""
    return [
        (prompt.token_ids, [int(cut) for cut in np.cumsum(prompt.pieces) if cut < len(prompt.token_ids)])
        for prompt in _prompts(adapter, kv_indices)
    ]


def _prompts(adapter: TransformersAdapter, kv_indices: np.ndarray) -> list[_Prompt]:
    chunk_size = adapter.layers.chunk_size
    num_short = min(_SHORT, 3 * len(kv_indices) // 8)
    num_long = min(_BESIDE_CHUNK + chunk_size, len(kv_indices) - num_short)
    first, last = _LONG_PIECES
    long_pieces = [*first, chunk_size + 6, *last]
    return [
        _Prompt(probe_tokens(adapter.model, num_long), kv_indices[:num_long], 0, long_pieces, []),
        _Prompt(probe_tokens(adapter.model, num_short, seed=8), kv_indices[num_long:], 1, list(_SHORT_PIECES), []),
    ]


def _error(actual: Tensor, expected: Tensor, share: float) -> float:
    """Error that `share` of the rows keep below, infinite if anything is NaN; both (num_rows, vocab_size)."""
    errors = (actual - expected).abs().amax(-1) / expected.abs().max()
    return math.inf if bool(errors.isnan().any()) else float(torch.quantile(errors, share))


@torch.inference_mode()
def _own_logits(adapter: TransformersAdapter, prompts: list[_Prompt]) -> list[Tensor]:
    with adapter.stock() as model:
        return [
            model(input_ids=torch.from_numpy(prompt.token_ids).to(model.device)[None], use_cache=False)
            .logits[0]
            .float()
            for prompt in prompts
        ]
