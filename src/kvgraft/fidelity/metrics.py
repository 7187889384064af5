"""How far an answer from grafted K/V is from the answer of a full prefill.

Compares next-token distributions over a fixed continuation and greedy outputs. Knows nothing about models or caches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


_TINY = 1e-300
"""Below every probability that a float64 softmax gives in practice; keeps the logarithm of a mixture finite."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """How far next-token distributions over one continuation are from those of full prefill.

    Attributes:
        mean_kl: Mean KL(full || reused) over the continuation, nats per token.
        mean_js: Mean Jensen-Shannon divergence, nats per token; symmetric and at most ln 2.
        first_kl: KL(full || reused) of the first token.
        first_flip: Whether the most likely first token is another one.
        top1: Share of positions whose most likely token is the same.
        equal_tokens: Tokens of the greedy output that are equal before the first that differs; all of them if none does.
        num_tokens: Length of the continuation.
    """

    mean_kl: float
    mean_js: float
    first_kl: float
    first_flip: bool
    top1: float
    equal_tokens: int
    num_tokens: int

    @property
    def greedy_equal(self) -> bool:
        """Whether the greedy outputs are equal, token for token."""
        return self.equal_tokens == self.num_tokens


@dataclass(frozen=True, slots=True)
class AgreementSummary:
    """Means of `Divergence` over requests, `greedy_equal` as a share."""

    requests: int
    mean_kl: float
    top1: float
    greedy_equal: float

    @classmethod
    def of(cls, divergences: Sequence[Divergence]) -> AgreementSummary:
        """Average `divergences`; at least one is needed."""
        return cls(
            requests=len(divergences),
            mean_kl=fmean(d.mean_kl for d in divergences),
            top1=fmean(d.top1 for d in divergences),
            greedy_equal=fmean(float(d.greedy_equal) for d in divergences),
        )


def divergence(full: Tensor, reused: Tensor) -> Divergence:
    """Compare logits (num_tokens, vocab_size) over full prefill's own greedy continuation.

    Along that continuation both sides have read the same tokens, so greedy decoding with reuse follows it exactly up to the
    first position whose most likely token is another one.
    """
    expected, actual = full.double().log_softmax(-1), reused.double().log_softmax(-1)
    kl = _kl(expected, actual)
    middle = (expected.exp() + actual.exp()).clamp_min(_TINY).log() - math.log(2)
    js = (_kl(expected, middle) + _kl(actual, middle)) / 2
    same = expected.argmax(-1) == actual.argmax(-1)
    differing = (~same).nonzero()
    return Divergence(
        mean_kl=float(kl.mean()),
        mean_js=float(js.mean()),
        first_kl=float(kl[0]),
        first_flip=not bool(same[0]),
        top1=float(same.double().mean()),
        equal_tokens=int(differing[0]) if len(differing) else len(same),
        num_tokens=len(same),
    )


def answer_nll(logits: Tensor, answer: Sequence[int]) -> float:
    """Mean negative log-likelihood of `answer`, nats per token; row i of `logits` predicts `answer[i]`."""
    chosen = logits.double().log_softmax(-1)[range(len(answer)), list(answer)]
    return float(-chosen.mean())


def _kl(first: Tensor, second: Tensor) -> Tensor:
    """KL (num_tokens,) between log-probabilities (num_tokens, vocab_size)."""
    return (first.exp() * (first - second)).sum(-1)
