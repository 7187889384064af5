"""Recompute the tokens that the query looks at and that lie near a seam.

The error of a reused token is about (how much the query attends to it) x (how stale it is). The first factor is measured
by one pass of the live rows over the grafted K/V; the second falls with the distance from the start of the run, where
tokens depended most on the text that came before them there. The product chose 2.5-3 times better than either factor
alone at equal budget in our first measurements; query attention alone is the idea of ProphetKV
(https://arxiv.org/abs/2602.02579), the seam alone that of EPIC (https://arxiv.org/abs/2410.15332).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvgraft.graft.select.query_attention import QueryAttention

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvgraft.graft.select.base import Observation, SelectionContext


@dataclass(frozen=True)
class QuerySeam(QueryAttention):
    """Recompute the share `ratio` of reused tokens with the highest `attention mass / (1 + distance from the seam)`.

    Attributes: as for `QueryAttention`.
    """

    name: ClassVar[str] = "query_seam"

    def _score(self, context: SelectionContext, observation: Observation) -> NDArray[np.floating]:
        return super()._score(context, observation) / (1.0 + context.seam_distance)
