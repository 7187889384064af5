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
        top1: Share of positions with the same most likely token.
        equal_tokens: Tokens of the greedy output that are equal before the first that differs; all of them if none does.
        num_tokens: Length of the continuation.
        token_kl: KL(full || reused) of every token, in order.
    """

    mean_kl: float
    mean_js: float
    first_kl: float
    first_flip: bool
    top1: float
    equal_tokens: int
    num_tokens: int
    token_kl: tuple[float, ...]

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
    first position with another most likely token.
    """
    expected, actual = full.double().log_softmax(-1), reused.double().log_softmax(-1)
    full_p, reused_p = expected.exp(), actual.exp()
    kl = _kl(full_p, expected, actual)
    middle = (full_p + reused_p).clamp_min(_TINY).log_() - math.log(2)
    js = (_kl(full_p, expected, middle) + _kl(reused_p, actual, middle)) / 2
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
        token_kl=tuple(kl.tolist()),
    )


def answer_nll(logits: Tensor, answer: Sequence[int]) -> float:
    """Mean negative log-likelihood of `answer`, nats per token; row i of `logits` predicts `answer[i]`."""
    chosen = logits.double().log_softmax(-1)[range(len(answer)), list(answer)]
    return float(-chosen.mean())


def _kl(probabilities: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """KL (num_tokens,) between log-probabilities (num_tokens, vocab_size), given the probabilities of the first."""
    return (first - second).mul_(probabilities).sum(-1)
