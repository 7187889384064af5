"""What a server must answer: the model in transformers, in float32, with K/V of one cache copied and rotated to another.

Nothing here uses kvgraft: the rotation is formed in float64 from the model's own inverse frequencies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, DynamicCache


class Fresh(NamedTuple):
    """Tokens to compute."""

    tokens: list[int]


class Copied(NamedTuple):
    """Tokens whose K/V are those of positions `[start, start + length)` of `cache`."""

    cache: DynamicCache
    start: int
    length: int


@dataclass(frozen=True)
class Answer:
    """Greedy continuation and its log-probabilities."""

    tokens: list[int]
    logprobs: list[float]


class Reference:
    """A model with the K/V surgery that reuse amounts to."""

    def __init__(self, model_dir: str) -> None:
        torch.set_num_threads(1)  # a server runs beside it
        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        self._inv_freq = self.model.model.rotary_emb.inv_freq.double()

    @torch.no_grad()
    def cache_of(self, *parts: Fresh | Copied) -> DynamicCache:
        """K/V of a prompt."""
        cache, _ = self._prefill(parts)
        return cache

    @torch.no_grad()
    def answer(self, parts: list[Fresh | Copied], num_tokens: int = 16) -> Answer:
        """Continue a prompt; the last part must be fresh."""
        cache, logits = self._prefill(parts)
        tokens, logprobs = [], []
        for _ in range(num_tokens):
            distribution = logits.log_softmax(-1)
            token = int(distribution.argmax())
            tokens.append(token)
            logprobs.append(float(distribution[token]))
            logits = self._compute(cache, [token])
        return Answer(tokens, logprobs)

    def _prefill(self, parts) -> tuple[DynamicCache, torch.Tensor | None]:
        cache, logits = DynamicCache(), None
        for part in parts:
            if isinstance(part, Fresh):
                logits = self._compute(cache, part.tokens) if part.tokens else logits
            else:
                self._copy(cache, part)
        return cache, logits

    def _compute(self, cache: DynamicCache, tokens: list[int]) -> torch.Tensor:
        first = cache.get_seq_length()
        positions = torch.arange(first, first + len(tokens))[None]
        return self.model(torch.tensor([tokens]), past_key_values=cache, position_ids=positions).logits[0, -1]

    def _copy(self, cache: DynamicCache, part: Copied) -> None:
        angle = self._inv_freq * (cache.get_seq_length() - part.start)
        cos, sin = angle.cos().float(), angle.sin().float()
        window = slice(part.start, part.start + part.length)
        for index, layer in enumerate(part.cache.layers):
            first, second = layer.keys[:, :, window].chunk(2, -1)
            keys = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
            cache.update(keys, layer.values[:, :, window].clone(), index)
