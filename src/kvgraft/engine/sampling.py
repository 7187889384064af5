"""How the next token is drawn from logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvgraft.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What to generate and when to stop.

    Attributes:
        max_new_tokens: Stop after this many tokens.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: Draw from the smallest set of tokens that holds this probability.
        top_k: Draw from this many most likely tokens; 0 is all.
        seed: Makes the draw of one request reproducible; None draws from torch's global generator.
        stop: Texts that end the output; they are cut off.
        ignore_eos: Go on behind an end-of-text token.
        logprobs: Report the log-probability of each token and of this many most likely ones; None reports nothing.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")
        if not self.temperature >= 0:
            raise ConfigError(f"temperature must be 0 (greedy) or more, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if self.top_k < 0:
            raise ConfigError(f"top_k must be 0 (all) or more, not {self.top_k}")
        if self.logprobs is not None and self.logprobs < 0:
            raise ConfigError(f"logprobs must be 0 or more, not {self.logprobs}")
        if any(not text for text in self.stop):
            raise ConfigError("stop texts must not be empty; leave them out")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely a generated token was, and which were most likely in its place.

    Attributes:
        token_id: The token drawn.
        logprob: Its natural log-probability under the model, before temperature, top-k and top-p.
        top: The most likely tokens and their log-probabilities, the likeliest first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Sampler:
    """Draws tokens for one request; holds its random state."""

    def __init__(self, params: SamplingParams, device: torch.device) -> None:
        self._params = params
        self._generator: torch.Generator | None = None
        if params.seed is not None:
            self._generator = torch.Generator(device).manual_seed(params.seed)

    def sample(self, logits: Tensor) -> int:
        """Draw a token id from float32 (vocab_size,) logits. O(vocab_size log vocab_size) unless greedy."""
        params = self._params
        if params.temperature == 0:
            return int(logits.argmax())
        # A temperature near 0 must sharpen towards the largest logit, not overflow to inf - inf.
        scaled = (logits - logits.max()) / params.temperature
        if params.top_k and params.top_k < len(scaled):
            scaled = scaled.masked_fill(scaled < scaled.topk(params.top_k).values[-1], -torch.inf)
        probabilities = scaled.softmax(dim=-1)
        if params.top_p < 1:
            probabilities = _nucleus(probabilities, params.top_p)
        return int(torch.multinomial(probabilities, 1, generator=self._generator))

    def logprobs(self, logits: Tensor, token_id: int) -> TokenLogprobs | None:
        """Say how likely `token_id` was under float32 (vocab_size,) logits; None unless the request asks."""
        if self._params.logprobs is None:
            return None
        logprobs = logits.log_softmax(dim=-1)
        values, ids = logprobs.topk(min(self._params.logprobs, len(logprobs)))
        return TokenLogprobs(
            token_id, float(logprobs[token_id]), tuple(zip(ids.tolist(), values.tolist(), strict=True))
        )


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Zero every token outside the smallest set that holds `top_p`. Source: https://arxiv.org/abs/1904.09751."""
    ordered, order = probabilities.sort(descending=True)
    outside = ordered.cumsum(dim=-1) - ordered >= top_p
    outside[0] = False  # a top_p that float32 rounds to 0 still leaves the most likely token
    return probabilities.index_fill(0, order[outside], 0.0)
