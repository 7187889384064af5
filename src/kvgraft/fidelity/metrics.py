"""How far an answer from grafted K/V is from the answer of a full prefill.

Compares next-token distributions over a fixed continuation and greedy outputs. Knows nothing about models or caches.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Agreement:
    """Agreement of one request with full prefill.

    Attributes:
        mean_kl: Mean KL(full || reused) of the next-token distribution, in nats per token.
        top1: Share of positions whose most likely token is the same.
        greedy_equal: Whether the greedy outputs are equal, token for token.
    """

    mean_kl: float
    top1: float
    greedy_equal: bool


def compare(full: Tensor, reused: Tensor, full_output: Sequence[int], reused_output: Sequence[int]) -> Agreement:
    """Compare logits (num_tokens, vocab_size) over the same continuation, and two greedy outputs."""
    expected, actual = full.double().log_softmax(-1), reused.double().log_softmax(-1)
    kl = (expected.exp() * (expected - actual)).sum(-1)
    same = (expected.argmax(-1) == actual.argmax(-1)).double()
    return Agreement(float(kl.mean()), float(same.mean()), list(full_output) == list(reused_output))


@dataclass(frozen=True, slots=True)
class AgreementSummary:
    """Means over requests: `Agreement`'s figures, `greedy_equal` as a share."""

    requests: int
    mean_kl: float
    top1: float
    greedy_equal: float

    @classmethod
    def of(cls, agreements: Sequence[Agreement]) -> AgreementSummary:
        """Average `agreements`; at least one is needed."""
        return cls(
            requests=len(agreements),
            mean_kl=fmean(a.mean_kl for a in agreements),
            top1=fmean(a.top1 for a in agreements),
            greedy_equal=fmean(float(a.greedy_equal) for a in agreements),
        )
