"""Prompts that the model's own forward pass has read, one of them as a cache that goes by similarity would have it read.

`StockPrompt` answers as `kvgraft.engine` probes do, so that every method of table T6 is asked in the same way.

The baseline takes the K/V of a text that resembles the prompt for the prompt's own, token for token from the beginning on.
It lives among the benchmarks: nothing that serves requests imports it.
"""

from __future__ import annotations

from collections import Counter
from math import sqrt
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from kvgraft.fidelity import cache_argument, cache_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from transformers import Cache, PreTrainedModel

    from kvgraft.types import TokenArray

SIMILAR = 0.6
"""Least cosine of a donor; SemBlend's default."""


class ReadPrompt(Protocol):
    """A prompt with its K/V, and continuations that are tried after it."""

    def logits(self, continuation: TokenArray) -> Tensor:
        """Return float32 (len(continuation), vocab_size); row i predicts `continuation[i]`."""

    def feed(self, offset: int, token_ids: TokenArray) -> Tensor:
        """Compute `token_ids` from `offset` after the prompt on; float32 (len(token_ids), vocab_size)."""


class StockPrompt:
    """A prompt in transformers' own K/V cache.

    Args:
        model: With an attention of transformers' own, full or of sliding windows.
        prompt: Token ids.
        donor: Token ids that are read in the place of as many of the prompt's first ones, fewer than all; maybe none.
    """

    def __init__(self, model: PreTrainedModel, prompt: TokenArray, donor: TokenArray | None = None) -> None:
        assert donor is None or len(donor) < len(prompt)
        self._model = model
        self._past: Cache | None = None
        taken = 0 if donor is None else len(donor)
        if donor is not None and taken:
            self._read(donor, 1)
        self._first = self._read(prompt[taken:], 1)
        self._num_fed = 0

    def logits(self, continuation: TokenArray) -> Tensor:
        """Return float32 (len(continuation), vocab_size); row i predicts `continuation[i]`."""
        return torch.cat([self._first, self.feed(0, continuation[:-1])])

    def feed(self, offset: int, token_ids: TokenArray) -> Tensor:
        """Compute `token_ids` from `offset` after the prompt on; what was fed there before is forgotten."""
        assert self._past is not None
        # Or a window that is full cannot be put back to before a continuation.
        self._past.activate_past_recording()
        if self._num_fed > offset:
            self._past.crop(offset - self._num_fed)
        self._num_fed = offset + len(token_ids)
        return self._read(token_ids, 0) if len(token_ids) else self._first[:0]

    @torch.inference_mode()
    def _read(self, token_ids: TokenArray, num_logits: int) -> Tensor:
        """Read tokens after what has been read; logits (num_logits, vocab_size) of the last ones, 0 for all."""
        given = torch.from_numpy(np.ascontiguousarray(token_ids))[None].to(self._model.device)
        output = self._model(
            given, use_cache=True, logits_to_keep=num_logits, **cache_argument(self._model, self._past)
        )
        self._past = cache_of(output)
        logits: Tensor = output.logits[0]
        return logits.float()


def substitute(prompt: TokenArray, question_at: int, donors: Sequence[TokenArray]) -> TokenArray:
    """Choose the donor whose K/V the baseline takes for the beginning of `prompt`, and how much of them.

    The donor is the text most like the prompt, by the cosine of how often each token occurs; it must be `SIMILAR`. Everything
    before the question is taken of it, where it is so long; the question is computed, or it would be another's.

    Returns:
        Token ids of the donor, maybe none: their K/V stand in for as many tokens of the prompt.
    """
    likeness, donor = max(
        ((cosine(prompt, each), each) for each in donors), key=lambda found: found[0], default=(0.0, prompt)
    )
    return donor[:question_at] if likeness >= SIMILAR else prompt[:0]


def common_beginning(first: TokenArray, second: TokenArray) -> int:
    """Tokens with which both begin."""
    size = min(len(first), len(second))
    unequal = np.flatnonzero(first[:size] != second[:size])
    return int(unequal[0]) if len(unequal) else size


def cosine(first: TokenArray, second: TokenArray) -> float:
    """How much alike two texts are, by the cosine of how often each token occurs."""
    here, there = Counter(first.tolist()), Counter(second.tolist())
    product = sum(count * there[token] for token, count in here.items())
    lengths = sqrt(sum(count**2 for count in here.values()) * sum(count**2 for count in there.values()))
    return product / lengths if lengths else 0.0
