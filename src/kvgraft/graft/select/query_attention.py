"""Recompute the tokens that the query looks at.

Source: ProphetKV, https://arxiv.org/abs/2602.02579: attention of the query on the reused keys, averaged over heads and
layers, ranks tokens better than how far they moved, because an error in a token without attention does no harm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from kvgraft.errors import ConfigError
from kvgraft.graft.select.base import Observable, Observation, Recompute, SelectionContext
from kvgraft.graft.select.ratio import RankingPolicy, best

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class QueryAttention(RankingPolicy):
    """Recompute the share `ratio` of reused tokens with the highest attention mass.

    Attributes:
        ratio: Share of reused tokens.
        sample_share: Share of these that is drawn instead of ranked. Where there is one, it alone estimates drift
            (`graft/drift.py`); where there is none, all chosen tokens do: what is attended to is what must be right.
        draw: `random`, or `attention` to draw in proportion to the attention mass.
    """

    name: ClassVar[str] = "query_attention"
    observes: ClassVar[frozenset[Observable]] = frozenset({Observable.QUERY_ATTENTION})
    ratio: float = 0.1
    sample_share: float = 0.0
    draw: str = "random"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.sample_share <= 1:
            raise ConfigError(f"{self.name} needs 0 <= sample_share <= 1, not {self.sample_share}; 0 draws nothing")
        if self.draw not in ("random", "attention"):
            raise ConfigError(f"{self.name} draws by 'random' or 'attention', not {self.draw!r}")

    def _look(self, nothing: NDArray[np.int64]) -> Recompute:
        return Recompute(nothing, observe_query=True)

    def _score(self, context: SelectionContext, observation: Observation) -> NDArray[np.floating]:
        assert observation.attention_mass is not None
        return observation.attention_mass[context.reused]

    def _choose(self, context: SelectionContext, observation: Observation, budget: int) -> Recompute:
        score = self._score(context, observation).astype(np.float64)
        num_drawn = round(self.sample_share * budget)
        if not num_drawn:
            positions = context.reused[best(score, budget)]
            return Recompute(positions, sample=positions)
        from kvgraft.graft.select.draw import drawn  # loaded where some are drawn: by default none are

        mass = QueryAttention._score(self, context, observation) if self.draw == "attention" else None
        sample = drawn(context, num_drawn, mass)
        score[sample] = np.inf
        return Recompute(context.reused[best(score, budget)], sample=context.reused[sample])
