"""How the next token is drawn from logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvgraft.config import quoted
from kvgraft.errors import ConfigError

_SEEDS = (-(2**63), 2**64 - 1)
"""What torch's generators take."""


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
        """Check every value; raises `ConfigError`."""
        _require(_is_integer(self.max_new_tokens, 1), "max_new_tokens is an integer of at least 1", self.max_new_tokens)
        _require(_is_number(self.temperature, 0), "temperature is a number from 0 (greedy) on", self.temperature)
        _require(
            _is_number(self.top_p, 0) and 0 < self.top_p <= 1, "top_p is a number above 0 and at most 1", self.top_p
        )
        _require(_is_integer(self.top_k, 0), "top_k is an integer, 0 (all) or more", self.top_k)
        _require(
            self.seed is None or (_is_integer(self.seed, _SEEDS[0]) and self.seed <= _SEEDS[1]),
            "seed is an integer from -2**63 to 2**64 - 1, or None",
            self.seed,
        )
        _require(
            isinstance(self.stop, tuple) and all(isinstance(text, str) and text for text in self.stop),
            "stop is a tuple of texts that are not empty",
            self.stop,
        )
        _require(isinstance(self.ignore_eos, bool), "ignore_eos is True or False", self.ignore_eos)
        _require(
            self.logprobs is None or _is_integer(self.logprobs, 0),
            "logprobs is an integer, 0 or more, or None",
            self.logprobs,
        )


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
        # A temperature near 0 must sharpen towards the largest logit; float32 would round it to 0, or give inf - inf.
        scaled = ((logits - logits.max()).double() / params.temperature).float()
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


def _is_integer(value: object, low: int) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= low)


def _is_number(value: object, low: float) -> bool:
    """Whether it is a finite number of at least `low`; integers beyond the floats are none."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        return False
    try:
        return low <= float(value) < math.inf
    except OverflowError:
        return False


def _require(holds: bool, rule: str, value: object) -> None:
    if not holds:
        raise ConfigError(f"{rule}, not {quoted(value)}")


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Zero every token outside the smallest set that holds `top_p`. Source: https://arxiv.org/abs/1904.09751."""
    ordered, order = probabilities.sort(descending=True)
    outside = ordered.cumsum(dim=-1) - ordered >= top_p
    outside[0] = False  # a top_p that float32 rounds to 0 still leaves the most likely token
    return probabilities.index_fill(0, order[outside], 0.0)
