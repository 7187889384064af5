"""Recompute the tokens whose keys changed most.

Source: CacheBlend, https://arxiv.org/abs/2405.16444: a token whose key in an early layer differs from the reused one also
differs in later layers. Layer 0 shows nothing, its keys depend on the token alone; layer 1 is the first that can tell.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvgraft.errors import ConfigError
from kvgraft.graft.select.base import Observable, Recompute, SelectionContext, SelectionPolicy, SelectionSteps


@dataclass(frozen=True)
class KVDeviation(SelectionPolicy):
    """Recompute the share `ratio` of reused tokens with the largest change of their key."""

    name: ClassVar[str] = "kv_deviation"
    observes: ClassVar[frozenset[Observable]] = frozenset({Observable.KEY_DEVIATION})
    ratio: float = 0.15

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ConfigError(f"kv_deviation needs 0 < ratio <= 1, not {self.ratio}; use 'none' to recompute nothing")

    @property
    def recompute_ratio(self) -> float:
        """`ratio`."""
        return self.ratio

    def steps(self, context: SelectionContext) -> SelectionSteps:
        """Look at the keys of all positions, then recompute the best `ceil(ratio * num_reused)`. O(num_reused)."""
        reused = context.reused
        budget = math.ceil(self.ratio * len(reused))
        if budget == len(reused):
            yield Recompute(reused)
            return
        observation = yield Recompute(reused[:0], observe_key_deviation=True)
        assert observation.key_deviation is not None
        chosen = np.argpartition(observation.key_deviation[reused], len(reused) - budget)[len(reused) - budget :]
        yield Recompute(np.sort(reused[chosen]))
