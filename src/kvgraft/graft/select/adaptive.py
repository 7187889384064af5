"""Recompute growing shares until the first token stops to change, or everything where that does not help.

Budgets are nested: r, 2r, 4r... of the tokens in the order of `query_seam`. Two neighbouring budgets whose first-token
distributions agree (Jensen-Shannon divergence below `tau`) say that more would not change the answer either; step doubling
is the classic idea for integrators (Runge's step halving), we found no paper that uses it for reuse. Where the next budget
would exceed `give_up`, the prompt is computed afresh: looks and repairs would cost more than they save.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from kvgraft.errors import ConfigError
from kvgraft.graft.select.base import Observable, Recompute, SelectionContext, SelectionPolicy, SelectionSteps
from kvgraft.graft.select.ratio import best

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvgraft.graft.select.base import Observation


@dataclass(frozen=True)
class Adaptive(SelectionPolicy):
    """Double the recomputed share until two first-token distributions agree.

    Attributes:
        ratio: Share of reused tokens in the first budget. At least two budgets are computed.
        tau: Jensen-Shannon divergence in nats (at most ln 2) below which two distributions agree.
        give_up: Largest share that is tried; beyond it everything is computed.
    """

    name: ClassVar[str] = "adaptive"
    observes: ClassVar[frozenset[Observable]] = frozenset({Observable.QUERY_ATTENTION, Observable.LOGITS})
    is_scattered: ClassVar[bool] = True
    ratio: float = 0.025
    tau: float = 1e-3
    give_up: float = 0.4

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= self.give_up <= 1:
            raise ConfigError(f"adaptive needs 0 < ratio <= give_up <= 1, not {self.ratio} and {self.give_up}")
        if not self.tau > 0:
            raise ConfigError(
                f"adaptive needs tau > 0, not {self.tau}; use recompute by a fixed share to ignore the answer"
            )

    @property
    def recompute_ratio(self) -> float:
        """The second budget, the least that is computed."""
        return min(1.0, 2 * self.ratio)

    def steps(self, context: SelectionContext) -> SelectionSteps:
        """Look, then compute nested budgets; what one step computed is not computed again by the next."""
        reused = context.reused
        if not len(reused):
            yield Recompute(reused)
            return
        observation = yield Recompute(reused[:0], observe_query=True)
        assert observation.attention_mass is not None
        score = observation.attention_mass[reused] / (1.0 + context.seam_distance)
        before: NDArray[np.float64] | None = None
        for share in self._shares():
            chosen = reused[best(score, math.ceil(share * len(reused)))]
            observation = yield Recompute(chosen, sample=chosen)
            now = _distribution(observation)
            if before is not None and jensen_shannon(before, now) < self.tau:
                return
            before = now
        yield Recompute(reused, afresh=True)

    def _shares(self) -> list[float]:
        doublings = int(math.log2(self.give_up / self.ratio) + 1e-9)
        return [self.ratio * 2**step for step in range(doublings + 1)]


def _distribution(observation: Observation) -> NDArray[np.float64]:
    assert observation.logits is not None, "engines that show no logits do not offer this policy"
    numbers = observation.logits.double().cpu().numpy()
    weights = np.exp(numbers - numbers.max())
    return np.asarray(weights / weights.sum(), np.float64)


def jensen_shannon(p: NDArray[np.float64], q: NDArray[np.float64]) -> float:
    """Jensen-Shannon divergence of two distributions, in nats: 0 for equal ones, ln 2 for disjoint ones."""
    middle = (p + q) / 2
    return float((_entropy_terms(p, middle) + _entropy_terms(q, middle)).sum() / 2)


def _entropy_terms(p: NDArray[np.float64], middle: NDArray[np.float64]) -> NDArray[np.float64]:
    ratio = np.divide(p, middle, out=np.ones_like(p), where=p > 0)
    return np.asarray(p * np.log(ratio), np.float64)
