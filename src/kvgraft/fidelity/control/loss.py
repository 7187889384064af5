"""The loss of an answer from grafted K/V against full prefill of the same prompt."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from kvgraft.errors import ConfigError
from kvgraft.fidelity.control.parts import AnswerPart

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

_MOST_TOKENS = 1024


class LossKind(StrEnum):
    """The quantity that is compared."""

    FIRST_TOKEN = "first_token"
    """1 if the most likely first token is another one."""
    KL = "kl"
    """`min(1, KL(full || grafted) / kappa)` of the first token's distribution, in nats."""
    GREEDY = "greedy"
    """1 if one of the first K tokens is not the one that full prefill finds most likely there."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss in [0, 1], written `first_token`, `kl:KAPPA` or `greedy:K`.

    It is one of each part of an answer: `first_token` and `kl` look at the first token of the part, `greedy` at those of its
    tokens that are among the first K of the answer.

    Attributes:
        kind: What is compared.
        kappa: Nats that count as a loss of 1, for `kl`.
        num_tokens: Output tokens that are compared where an answer has one part.
    """

    kind: LossKind
    kappa: float = 1.0
    num_tokens: int = 1

    @classmethod
    def parse(cls, text: str) -> Loss:
        """Read a loss as it is written; raises `ConfigError`."""
        name, _, value = text.partition(":")
        if text == LossKind.FIRST_TOKEN:
            return cls(LossKind.FIRST_TOKEN)
        if name == LossKind.KL and re.fullmatch(r"[0-9]+(\.[0-9]+)?(e-?[0-9]+)?", value):
            kappa = float(value)
            if 0 < kappa < math.inf:
                return cls(LossKind.KL, kappa=kappa)
        if name == LossKind.GREEDY and re.fullmatch(r"[0-9]{1,4}", value) and 1 <= int(value) <= _MOST_TOKENS:
            return cls(LossKind.GREEDY, num_tokens=int(value))
        raise ConfigError(
            f"unknown loss {text[:60]!r}; choose first_token, kl:KAPPA with KAPPA nats above 0, or greedy:K with K tokens "
            f"from 1 to {_MOST_TOKENS}"
        )

    def __str__(self) -> str:
        """As `parse` reads it."""
        if self.kind is LossKind.KL:
            return f"kl:{self.kappa:g}"
        return f"greedy:{self.num_tokens}" if self.kind is LossKind.GREEDY else str(self.kind)

    @property
    def is_binary(self) -> bool:
        """Whether it is 0 or 1."""
        return self.kind is not LossKind.KL

    def tokens(self, part: AnswerPart) -> slice:
        """Return which tokens of an answer, from 0, its `part` is judged by; never none."""
        match part:
            case AnswerPart.FIRST:
                return slice(0, 1)
            case AnswerPart.LATER:
                return slice(1, max(2, self.num_tokens))
            case AnswerPart.WHOLE:
                return slice(0, self.num_tokens)

    def length(self, parts: Iterable[AnswerPart]) -> int:
        """Return how many of an answer's first tokens its `parts`, at least one, are judged by."""
        return max(int(self.tokens(part).stop) for part in parts)

    def evidence(self, logits: NDArray[np.floating]) -> NDArray[np.floating] | NDArray[np.int64]:
        """Keep of the logits of output tokens, (num_tokens, vocab_size), what `of` needs.

        Returns:
            The most likely tokens, int64 (num_tokens,), or for `kl` the logits themselves, as a copy.
        """
        if self.kind is LossKind.KL:
            return logits.copy()
        most_likely: NDArray[np.int64] = logits.argmax(-1)
        return most_likely

    def of(self, full: NDArray[Any], grafted: NDArray[Any], part: AnswerPart = AnswerPart.WHOLE) -> float | None:
        """Compare a part of two answers, over as many tokens as both have.

        Args:
            full: Evidence of the answer by full prefill, from its first token on.
            grafted: As served.
            part: Of the answer.

        Returns:
            The loss; None where one of them ended before the part.
        """
        full, grafted = full[self.tokens(part)], grafted[self.tokens(part)]
        count = min(len(full), len(grafted))
        if not count:
            return None
        if self.kind is LossKind.KL:
            return min(1.0, _kl(full[0], grafted[0]) / self.kappa)
        return float(np.any(full[:count] != grafted[:count]))


def _kl(full: NDArray[np.floating], grafted: NDArray[np.floating]) -> float:
    """KL divergence of two next-token distributions given as logits (vocab_size,), in nats, in double precision.

    Infinite where one of them is none: a comparison that says nothing must not pass for a perfect answer.
    """
    expected, actual = (_log_softmax(logits.astype(np.float64)) for logits in (full, grafted))
    possible = expected > -np.inf
    kl = float(np.sum(np.exp(expected[possible]) * (expected[possible] - actual[possible])))
    is_distribution = not (np.isnan(expected).any() or np.isnan(actual).any())
    return max(0.0, kl) if is_distribution else math.inf


def _log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    with np.errstate(invalid="ignore"):  # of logits that are all -inf
        normalised: NDArray[np.float64] = logits - np.logaddexp.reduce(logits)
    return normalised
