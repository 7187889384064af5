"""What counts as a loss when an answer from grafted K/V is held against full prefill of the same prompt."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MOST_TOKENS = 1024


class LossKind(StrEnum):
    """What is compared."""

    FIRST_TOKEN = "first_token"
    """1 if the most likely first token is another one."""
    KL = "kl"
    """`min(1, KL(full || grafted) / kappa)` of the first token's distribution, in nats."""
    GREEDY = "greedy"
    """1 if one of the first K tokens is not the one that full prefill finds most likely there."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss in [0, 1], written `first_token`, `kl:KAPPA` or `greedy:K`.

    Attributes:
        kind: What is compared.
        kappa: Nats that count as a loss of 1, for `kl`.
        num_tokens: Output tokens that are compared.
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

    def evidence(self, logits: NDArray[np.floating]) -> NDArray[np.floating] | NDArray[np.int64]:
        """Keep of the logits of the first output tokens what `of` needs.

        Args:
            logits: (at least 1, vocab_size); rows behind `num_tokens` are not looked at.

        Returns:
            The most likely tokens, int64 (at most num_tokens,), or for `kl` the first row.
        """
        if self.kind is LossKind.KL:
            first: NDArray[np.floating] = logits[0].copy()
            return first
        most_likely: NDArray[np.int64] = logits[: self.num_tokens].argmax(-1)
        return most_likely

    def of(self, full: NDArray[Any], grafted: NDArray[Any]) -> float:
        """Compare the evidence of two answers to a prompt, over as many tokens as both have.

        Args:
            full: By full prefill.
            grafted: As served.
        """
        if self.kind is LossKind.KL:
            return min(1.0, _kl(full, grafted) / self.kappa)
        count = min(len(full), len(grafted))
        return float(np.any(full[:count] != grafted[:count]))


def _kl(full: NDArray[np.floating], grafted: NDArray[np.floating]) -> float:
    """KL divergence of two next-token distributions given as logits (vocab_size,), in nats, in double precision."""
    expected, actual = (_log_softmax(logits.astype(np.float64)) for logits in (full, grafted))
    return max(0.0, float(np.sum(np.exp(expected) * (expected - actual))))


def _log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    normalised: NDArray[np.float64] = logits - np.logaddexp.reduce(logits)
    return normalised
