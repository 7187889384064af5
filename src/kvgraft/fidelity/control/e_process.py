"""Evidence that may be looked at after every audit: wealth of bets on or against the risk `epsilon`.

A bet `b` multiplies its wealth by `1 + b (loss - epsilon)`. If the risk is at least epsilon, bets with `b < 0` cannot be
expected to grow; if it is at most epsilon, those with `b > 0` cannot. By Ville's inequality the mean wealth of several bets
then reaches `1 / delta` with a probability of at most `delta`, however often one looks. One bet alone is good at one distance
from epsilon only, so several are mixed. Waudby-Smith and Ramdas, https://arxiv.org/abs/2010.09686.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_CERTIFYING_SHARES = (0.1, 0.25, 0.5, 0.75, 0.95)
"""Of the largest bet that a loss of 1 does not ruin, `1 / (1 - epsilon)`."""
_ALARMING_SHARES = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64)
"""Of the largest bet that a loss of 0 does not ruin, `1 / epsilon`; at 2 % these are bets of 0.5 to 32."""


def certifying_bets(epsilon: float) -> tuple[float, ...]:
    """Bets that grow while the risk is below `epsilon`."""
    return tuple(-share / (1 - epsilon) for share in _CERTIFYING_SHARES)


def alarming_bets(epsilon: float) -> tuple[float, ...]:
    """Bets that grow while the risk is above `epsilon`."""
    return tuple(share / epsilon for share in _ALARMING_SHARES)


@dataclass(slots=True, eq=False)
class EProcess:
    """A mixture of bets and its wealth so far.

    Attributes:
        bets: Factors per unit of loss above epsilon.
        epsilon: In (0, 1).
        log_wealth: float64 (len(bets),), natural logarithms.
    """

    bets: tuple[float, ...]
    epsilon: float
    log_wealth: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))

    def __post_init__(self) -> None:
        if not len(self.log_wealth):
            self.log_wealth = np.zeros(len(self.bets))

    def update(self, loss: float) -> None:
        """Take in the loss of one audit, in [0, 1]. O(bets)."""
        self.log_wealth += np.log1p(np.asarray(self.bets) * (loss - self.epsilon))

    @property
    def log_e(self) -> float:
        """Logarithm of the mean wealth."""
        return float(np.logaddexp.reduce(self.log_wealth)) - math.log(len(self.bets))

    def exceeds(self, delta: float) -> bool:
        """Whether the mean wealth is `1 / delta` or more."""
        return self.log_e >= -math.log(delta)


def log_e_path(bets: Sequence[float], epsilon: float, losses: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return what `EProcess.log_e` is after each loss, for many streams at once.

    Args:
        bets: As of `EProcess`.
        epsilon: In (0, 1).
        losses: (..., num_audits) in [0, 1].

    Returns:
        float64, of the same shape. O(bets * losses) time, twice the memory of `losses`.
    """
    total = np.full(losses.shape, -np.inf)
    for bet in bets:
        np.logaddexp(total, np.cumsum(np.log1p(bet * (losses - epsilon)), axis=-1), out=total)
    return total - math.log(len(bets))
