"""Recompute the tokens that really moved most: what a ranking by deviation could reach at best. For benchmarks only.

It needs what only a full prefill knows, so no engine's settings name it: build it with that and hand it to `LLM.generate`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvgraft.errors import ConfigError
from kvgraft.graft.select.base import Recompute, SelectionContext, SelectionSteps
from kvgraft.graft.select.ratio import RatioPolicy, best

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Oracle(RatioPolicy):
    """Recompute the share `ratio` of reused tokens with the highest of given scores.

    Attributes:
        ratio: Share of reused tokens.
        deviation: float (num_tokens,), per prompt position what the ranking goes by: how far K/V of the grafted prompt are
            from those of a full prefill, say.
    """

    name: ClassVar[str] = "oracle"
    ratio: float
    deviation: NDArray[np.floating]

    def steps(self, context: SelectionContext) -> SelectionSteps:
        """Take one step; raises `ConfigError` where the scores are those of another prompt."""
        if len(self.deviation) != context.num_tokens:
            raise ConfigError(f"the oracle knows {len(self.deviation)} tokens and the prompt has {context.num_tokens}")
        yield Recompute(context.reused[best(self.deviation[context.reused], self.budget(context))])
