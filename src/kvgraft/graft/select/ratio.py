"""What policies have in common that look once and then recompute a fixed share of the reused tokens."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.errors import ConfigError
from kvgraft.graft.select.base import Observation, Recompute, SelectionContext, SelectionPolicy, SelectionSteps

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class RatioPolicy(SelectionPolicy):
    """Recompute the share `ratio` of reused tokens with the highest score."""

    ratio: float

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ConfigError(f"{self.name} needs 0 < ratio <= 1, not {self.ratio}; use 'none' to recompute nothing")

    @property
    def recompute_ratio(self) -> float:
        """The share that was asked for, whatever is reused."""
        return self.ratio

    def steps(self, context: SelectionContext) -> SelectionSteps:
        """Look, then recompute the best `ceil(ratio * num_reused)` positions. O(num_reused)."""
        reused = context.reused
        budget = math.ceil(self.ratio * len(reused))
        if budget == len(reused):
            yield Recompute(reused)
            return
        observation = yield self._look(reused[:0])
        score = self._score(context, observation)
        chosen = np.argpartition(score, len(reused) - budget)[len(reused) - budget :]
        yield Recompute(np.sort(reused[chosen]))

    @abstractmethod
    def _look(self, nothing: NDArray[np.int64]) -> Recompute:
        """The step that computes nothing again and asks for an observation."""

    @abstractmethod
    def _score(self, context: SelectionContext, observation: Observation) -> NDArray[np.floating]:
        """One number per reused token."""
