"""Recompute the tokens whose keys changed most.

Source: CacheBlend, https://arxiv.org/abs/2405.16444: a token whose key in an early layer differs from the reused one also
differs in later layers. Layer 0 shows nothing, its keys depend on the token alone; layer 1 is the first that can tell.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvgraft.graft.select.base import Observable, Observation, Recompute, SelectionContext
from kvgraft.graft.select.ratio import RatioPolicy

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class KVDeviation(RatioPolicy):
    """Recompute the share `ratio` of reused tokens with the largest change of their key."""

    name: ClassVar[str] = "kv_deviation"
    observes: ClassVar[frozenset[Observable]] = frozenset({Observable.KEY_DEVIATION})
    ratio: float = 0.15

    def _look(self, nothing: NDArray[np.int64]) -> Recompute:
        return Recompute(nothing, observe_key_deviation=True)

    def _score(self, context: SelectionContext, observation: Observation) -> NDArray[np.floating]:
        assert observation.key_deviation is not None
        return observation.key_deviation[context.reused]
