"""How surprising a sample of losses would be if the risk were as high as what must not be exceeded.

Losses lie in [0, 1] and come from exchangeable requests. A p-value is valid: if the risk is `epsilon` or more, it is at most
`delta` with a probability of at most `delta`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


def binomial_cdf(successes: int, trials: int, probability: float) -> float:
    """P(Bin(trials, probability) <= successes), summed in logarithms. O(successes); 0 < probability < 1."""
    if successes >= trials:
        return 1.0
    if successes < 0:
        return 0.0
    drawn = np.arange(1, successes + 1)
    ratios = np.log((trials - drawn + 1) / drawn) + math.log(probability) - math.log1p(-probability)
    log_terms = np.concatenate(([0.0], np.cumsum(ratios))) + trials * math.log1p(-probability)
    return min(1.0, float(np.exp(np.logaddexp.reduce(log_terms))))


def clopper_pearson(losses: int, trials: int, epsilon: float) -> float:
    """Return the p-value of "the risk is at least `epsilon`" for losses that are 0 or 1.

    Exact: the probability of so few losses at the risk `epsilon`. Clopper and Pearson, Biometrika 26 (1934).

    Args:
        losses: Requests with loss 1.
        trials: Requests.
        epsilon: In (0, 1).
    """
    return binomial_cdf(losses, trials, epsilon)


def hoeffding_bentkus(loss_sum: float, trials: int, epsilon: float) -> float:
    """Return the p-value of "the risk is at least `epsilon`" for losses anywhere in [0, 1].

    The smaller of Hoeffding's and Bentkus' bounds: Bates et al., https://arxiv.org/abs/2101.02703.

    Args:
        loss_sum: Sum of the losses.
        trials: Requests.
        epsilon: In (0, 1).
    """
    if trials == 0:
        return 1.0
    mean = min(loss_sum / trials, epsilon)
    hoeffding = math.exp(-trials * _divergence(mean, epsilon))
    bentkus = math.e * binomial_cdf(math.ceil(loss_sum), trials, epsilon)
    return min(1.0, hoeffding, bentkus)


def _divergence(mean: float, epsilon: float) -> float:
    """KL(Bernoulli(mean) || Bernoulli(epsilon)) in nats."""
    first = mean * math.log(mean / epsilon) if mean > 0 else 0.0
    return first + ((1 - mean) * math.log((1 - mean) / (1 - epsilon)) if mean < 1 else 0.0)


@dataclass(frozen=True, slots=True)
class LossSample:
    """Losses of one setting.

    Attributes:
        count: Requests.
        loss_sum: Sum of their losses.
        is_binary: Whether each is 0 or 1.
    """

    count: int
    loss_sum: float
    is_binary: bool

    @property
    def mean(self) -> float:
        """Mean loss; 0 without requests."""
        return self.loss_sum / self.count if self.count else 0.0

    def p_value(self, epsilon: float) -> float:
        """Of "the risk is at least `epsilon`", in (0, 1)."""
        if self.is_binary:
            return clopper_pearson(round(self.loss_sum), self.count, epsilon)
        return hoeffding_bentkus(self.loss_sum, self.count, epsilon)

    def upper_limit(self, delta: float) -> float:
        """Return the least risk that the sample rejects at level `delta`, by bisection to 1e-9; 1 without requests."""
        low, high = 0.0, 1.0
        while high - low > 1e-9:
            middle = (low + high) / 2
            if self.p_value(middle) > delta:
                low = middle
            else:
                high = middle
        return high


def trials_needed(epsilon: float, delta: float, rate: float = 0.0) -> int | None:
    """Return how many requests reject "the risk is at least `epsilon`" if the share `rate` of them has loss 1.

    Losses are counted up: `ceil(rate * trials)`. None where `rate` is so close to `epsilon` that a million are too few.
    """
    if rate >= epsilon:
        return None
    low, high = 0, math.ceil(math.log(delta) / math.log1p(-epsilon))
    while clopper_pearson(math.ceil(rate * high), high, epsilon) > delta:
        low, high = high, high * 2
        if high > 1_000_000:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        if clopper_pearson(math.ceil(rate * middle), middle, epsilon) > delta:
            low = middle
        else:
            high = middle
    return high
