"""Recompute the tokens with the keys that changed most.

Source: CacheBlend, https://arxiv.org/abs/2405.16444: a token whose key in an early layer differs from the reused one also
differs in later layers. Keys of layer 0 depend on the token alone; layer 1 is the first that shows a difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvgraft.errors import ConfigError
from kvgraft.graft.select.base import Observable, Observation, Recompute, SelectionContext
from kvgraft.graft.select.ratio import RankingPolicy

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class KVDeviation(RankingPolicy):
    """Recompute the share `ratio` of reused tokens with the largest change of their key in `layer`.

    The look computes every position through the layers before it. Its choice is no sample of the run's drift: it takes the
    tokens that moved most.
    """

    name: ClassVar[str] = "kv_deviation"
    observes: ClassVar[frozenset[Observable]] = frozenset({Observable.KEY_DEVIATION})
    ratio: float = 0.15
    layer: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layer < 1:
            raise ConfigError(
                f"kv_deviation needs layer >= 1, not {self.layer}: keys of layer 0 depend on the token alone"
            )

    def _look(self, nothing: NDArray[np.int64]) -> Recompute:
        return Recompute(nothing, observe_key_deviation=True, deviation_layer=self.layer)

    def _score(self, context: SelectionContext, observation: Observation) -> NDArray[np.floating]:
        assert observation.key_deviation is not None
        return observation.key_deviation[context.reused]
