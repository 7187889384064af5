"""Settings of a request for how its tokens are drawn, and when they end."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.config import quoted
from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from kvgraft.engine.sampling.structure import StructureSpec

_SEEDS = (-(2**63), 2**64 - 1)
"""Range of torch's generators."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Settings for how to generate and when to stop.

    Rules on logits apply in this order: `structure`, `allowed_token_ids`, `bad_token_ids`, `min_tokens`, `logit_bias`,
    `repetition_penalty`, `frequency_penalty` and `presence_penalty`, `temperature`, `top_k`, `min_p`, `top_p`. Those before
    `temperature` hold for greedy requests, too. They count tokens, never K/V. It is vLLM's order; that of transformers
    differs in `top_p`, which goes before `min_p` there.

    Attributes:
        max_new_tokens: Stop after this many tokens.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: Draw from the smallest set of tokens that holds this probability.
        top_k: Draw from this many most likely tokens; 0 is all.
        seed: Makes the draw of one request reproducible; None draws from torch's global generator.
        stop: Texts that end the output; they are cut off.
        ignore_eos: Go on after an end-of-text token.
        logprobs: Report the log-probability of each token and of this many most likely ones; None reports nothing.
        min_p: Draw from tokens that are at least this times as likely as the likeliest; 0 is all.
        include_stop: Leave what ended the output in its text: the stop text, or the text of the token.
        stop_token_ids: Tokens that end the output besides the model's own, also with `ignore_eos`.
        min_tokens: Draw neither end-of-text tokens nor `stop_token_ids` before this many tokens are out, unless `structure`
            leaves nothing else, and take no notice of stop texts in these.
        repetition_penalty: Positive logits of tokens of prompt and output are divided by it, negative ones multiplied; 1 is
            none. Source: https://arxiv.org/abs/1909.05858.
        frequency_penalty: Subtract this times the number of times that the output has a token; from -2 to 2.
        presence_penalty: Subtract this from logits of tokens that the output has; from -2 to 2.
        logit_bias: Pairs of token id and what is added to its logit; of a token that is named twice the sum.
        allowed_token_ids: Draw no other tokens; None allows all.
        bad_token_ids: Sequences of tokens that must not come about, also where they begin in the prompt.
            `kvgraft.engine.sampling.bad_words` makes them of words.
        structure: What the output has to be, as text, or None. See `kvgraft.engine.sampling.structure`.
        skip_special_tokens: Leave special tokens out of the text.
        prompt_logprobs: As `logprobs`, for each token of the prompt but the first. The prompt is computed in full then,
            with any reuse: cached K/V have no logits.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    min_p: float = 0.0
    include_stop: bool = False
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    structure: StructureSpec | None = None
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        """Check every value; raises `ConfigError`."""
        _require(
            _is_integer(self.max_new_tokens, 1), "max_new_tokens", "is an integer of at least 1", self.max_new_tokens
        )
        _require(
            self.seed is None or (_is_integer(self.seed, _SEEDS[0]) and self.seed <= _SEEDS[1]),
            "seed",
            "is an integer from -2**63 to 2**64 - 1, or None",
            self.seed,
        )
        _require(
            isinstance(self.stop, tuple) and all(isinstance(text, str) and text for text in self.stop),
            "stop",
            "is a tuple of texts that are not empty",
            self.stop,
        )
        self._check_distribution()
        self._check_penalties()
        self._check_token_ids()
        for name in ("ignore_eos", "include_stop", "skip_special_tokens"):
            _require(isinstance(getattr(self, name), bool), name, "is True or False", getattr(self, name))
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(value is None or _is_integer(value, 0), name, "is an integer, 0 or more, or None", value)
        # Integers may be larger than any that torch calculates with.
        for name in ("temperature", "repetition_penalty"):
            object.__setattr__(self, name, float(getattr(self, name)))
        object.__setattr__(self, "logit_bias", tuple((token, float(bias)) for token, bias in self.logit_bias))

    def _check_distribution(self) -> None:
        _require(_is_number(self.temperature, 0), "temperature", "is a number from 0 (greedy) on", self.temperature)
        _require(
            _is_number(self.top_p, 0, 1) and self.top_p > 0, "top_p", "is a number above 0 and at most 1", self.top_p
        )
        _require(_is_number(self.min_p, 0, 1), "min_p", "is a number from 0 to 1", self.min_p)
        _require(_is_integer(self.top_k, 0), "top_k", "is an integer, 0 (all) or more", self.top_k)
        _require(_is_integer(self.min_tokens, 0), "min_tokens", "is an integer, 0 or more", self.min_tokens)

    def _check_penalties(self) -> None:
        _require(
            _is_number(self.repetition_penalty, 0) and self.repetition_penalty > 0,
            "repetition_penalty",
            "is a number above 0",
            self.repetition_penalty,
        )
        for name in ("frequency_penalty", "presence_penalty"):
            _require(_is_number(getattr(self, name), -2, 2), name, "is a number from -2 to 2", getattr(self, name))
        _require(
            isinstance(self.logit_bias, tuple)
            and all(_is_integer(token, 0) and _is_number(bias, -math.inf) for token, bias in self.logit_bias),
            "logit_bias",
            "is a tuple of pairs of a token id and a number",
            self.logit_bias,
        )

    def _check_token_ids(self) -> None:
        _require(_are_ids(self.stop_token_ids), "stop_token_ids", "is a tuple of token ids", self.stop_token_ids)
        _require(
            self.allowed_token_ids is None or (_are_ids(self.allowed_token_ids) and bool(self.allowed_token_ids)),
            "allowed_token_ids",
            "is a tuple of token ids that is not empty, or None",
            self.allowed_token_ids,
        )
        _require(
            isinstance(self.bad_token_ids, tuple) and all(_are_ids(ids) and ids for ids in self.bad_token_ids),
            "bad_token_ids",
            "is a tuple of tuples of token ids, none of them empty",
            self.bad_token_ids,
        )


def _are_ids(value: object) -> bool:
    return isinstance(value, tuple) and all(_is_integer(token, 0) for token in value)


def _is_integer(value: object, low: int) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= low)


def _is_number(value: object, low: float, high: float = math.inf) -> bool:
    """Return whether it is a finite number from `low` to `high`; integers beyond the floats are none."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        return False
    try:
        return math.isfinite(value) and low <= float(value) <= high
    except OverflowError:
        return False


def _require(holds: bool, name: str, rule: str, value: object) -> None:
    if not holds:
        raise ConfigError(f"{name} {rule}, not {quoted(value)}", name)
