"""Bases of policies that recompute a fixed share of the reused tokens, most of them after one look."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from kvgraft.errors import ConfigError
from kvgraft.graft.select.base import Observation, Recompute, SelectionContext, SelectionPolicy, SelectionSteps

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class RatioPolicy(SelectionPolicy):
    """Recompute the share `ratio` of reused tokens; of those that the prompt says before, too, a larger one (`repeats`)."""

    version: ClassVar[int] = 5  # from 5 on 64 repeated tokens count as several
    is_scattered: ClassVar[bool] = True
    ratio: float

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ConfigError(f"{self.name} needs 0 < ratio <= 1, not {self.ratio}; use 'none' to recompute nothing")

    @property
    def recompute_ratio(self) -> float:
        """The share of the parameters, for any prompt."""
        return self.ratio

    def budget(self, context: SelectionContext) -> int:
        """Return the number of tokens of the share, of which repeated ones get more."""
        return min(len(context.reused), math.ceil(self.ratio * context.num_counted))


@dataclass(frozen=True)
class RankingPolicy(RatioPolicy):
    """Look once, then recompute the share `ratio` of reused tokens with the highest score."""

    def steps(self, context: SelectionContext) -> SelectionSteps:
        """Look, then recompute the best `ceil(ratio * num_reused)` positions. O(num_reused)."""
        reused, budget = context.reused, self.budget(context)
        if budget == len(reused):
            yield Recompute(reused)
            return
        observation = yield self._look(reused[:0])
        yield self._choose(context, observation, budget)

    def _choose(self, context: SelectionContext, observation: Observation, budget: int) -> Recompute:
        """Return the step that computes `budget` tokens, fewer than are reused."""
        return Recompute(context.reused[best(self._score(context, observation), budget)])

    @abstractmethod
    def _look(self, nothing: NDArray[np.int64]) -> Recompute:
        """Return the step that computes nothing again and asks for an observation."""

    @abstractmethod
    def _score(self, context: SelectionContext, observation: Observation) -> NDArray[np.floating]:
        """Return one number per reused token."""


def best(score: NDArray[np.floating], count: int) -> NDArray[np.int64]:
    """Return ascending indices of the `count` highest scores, of equal ones the first. O(n log n)."""
    return np.sort(np.argsort(-score, kind="stable")[:count])
