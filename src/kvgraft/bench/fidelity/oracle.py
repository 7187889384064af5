"""Recompute the tokens that matter most: what a ranking could reach at best. For benchmarks only.

The error of a reused token is about (how much the query attends to it) x (how far its K/V are from those of a full prefill).
The second factor is what only a full prefill knows, so no engine's settings name this policy: `kvgraft bench fidelity`
measures it for each prompt, or build the policy with it and hand it to `LLM.generate`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from kvgraft.errors import ConfigError
from kvgraft.graft.select.base import Recompute
from kvgraft.graft.select.query_attention import QueryAttention

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvgraft.graft.select.base import Observation, SelectionContext


@dataclass(frozen=True, eq=False)
class Oracle(QueryAttention):
    """Recompute the share `ratio` of reused tokens with the highest `attention mass * deviation`.

    Attributes: as for `QueryAttention`, and
        deviation: float (num_tokens,), per prompt position how far K/V of the grafted prompt are from those of a full
            prefill, in any unit.
    """

    name: ClassVar[str] = "oracle"
    deviation: NDArray[np.floating] = field(default_factory=lambda: np.empty(0))

    def _score(self, context: SelectionContext, observation: Observation) -> NDArray[np.floating]:
        """Raises `ConfigError` where the deviations are those of another prompt."""
        if len(self.deviation) != context.num_tokens:
            raise ConfigError(f"the oracle knows {len(self.deviation)} tokens and the prompt has {context.num_tokens}")
        return super()._score(context, observation) * self.deviation[context.reused]

    def _choose(self, context: SelectionContext, observation: Observation, budget: int) -> Recompute:
        """Leave no sample: tokens that were chosen because they moved do not stand for their run."""
        return Recompute(super()._choose(context, observation, budget).positions)
