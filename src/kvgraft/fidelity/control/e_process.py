"""Evidence that may be looked at after every audit: wealth of bets on or against the risk `epsilon`.

A bet `b` multiplies its wealth by `1 + b (loss - epsilon)`. If the risk is at least epsilon, bets with `b < 0` cannot be
expected to grow; if it is at most epsilon, those with `b > 0` cannot. By Ville's inequality the mean wealth of several bets
then reaches `1 / delta` with a probability of at most `delta`, however often one looks. One bet alone is good at one distance
from epsilon only, so several are mixed. Waudby-Smith and Ramdas, https://arxiv.org/abs/2010.09686.

Wealth that was lost while all was well is missed when traffic changes. So a share of the wealth may be kept back and bet anew
at every audit, in portions that add up to it for ever: the mixture over starting times is as valid as the mixture over bets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_CERTIFYING_SHARES = (0.1, 0.25, 0.5, 0.75, 0.95)
"""Of the largest bet that a loss of 1 does not ruin, `1 / (1 - epsilon)`."""
_ALARMING_SHARES = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64)
"""Of the largest bet that a loss of 0 does not ruin, `1 / epsilon`; at 2 % these are bets of 0.5 to 32."""
_RESTARTED_SHARE = 0.1
"""Of an alarm's wealth, bet anew at later audits. Costs 0.1 nats where the risk was too high from the beginning."""
_SUM_OF_PORTIONS = 2.10975
"""Upper bound of the sum of `1 / (n ln(n)^2)` over n from 2 on."""


@dataclass(slots=True, eq=False)
class EProcess:
    """A mixture of bets and its wealth so far; of one stream of losses, or of many at once.

    Attributes:
        bets: Factors per unit of loss above epsilon.
        epsilon: In (0, 1).
        restarted: Share of the wealth that is bet anew at later losses.
        num_losses: Losses taken in.
        log_wealth: float64 (..., len(bets)), natural logarithms.
    """

    bets: tuple[float, ...]
    epsilon: float
    restarted: float = 0.0
    num_losses: int = 0
    log_wealth: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))

    def __post_init__(self) -> None:
        if not self.log_wealth.size:
            self.log_wealth = np.full(len(self.bets), math.log1p(-self.restarted))

    @classmethod
    def certificate(cls, epsilon: float) -> EProcess:
        """Bets that grow while the risk is below `epsilon`."""
        return cls(tuple(-share / (1 - epsilon) for share in _CERTIFYING_SHARES), epsilon)

    @classmethod
    def alarm(cls, epsilon: float) -> EProcess:
        """Bets that grow while the risk is above `epsilon`, or since it is."""
        return cls(tuple(share / epsilon for share in _ALARMING_SHARES), epsilon, _RESTARTED_SHARE)

    def update(self, loss: float | NDArray[np.floating]) -> None:
        """Take in the loss of one audit, in [0, 1]; of many streams (...). O(bets)."""
        if self.restarted and self.num_losses:
            number = self.num_losses + 1
            portion = self.restarted / (_SUM_OF_PORTIONS * number * math.log(number) ** 2)
            self.log_wealth = np.logaddexp(self.log_wealth, math.log(portion))
        above = np.asarray(loss, np.float64)[..., None] - self.epsilon
        self.log_wealth = self.log_wealth + np.log1p(np.asarray(self.bets) * above)
        self.num_losses += 1

    @property
    def log_e(self) -> NDArray[np.float64]:
        """Logarithm of the mean wealth, (...). What is kept back is not counted."""
        total: NDArray[np.float64] = np.logaddexp.reduce(self.log_wealth, axis=-1)
        return total - math.log(len(self.bets))

    def exceeds(self, delta: float) -> bool:
        """Whether the mean wealth of the one stream is `1 / delta` or more."""
        return bool(self.log_e >= -math.log(delta))
