"""A selection policy in a package of its own: compute the last tokens of every reused run again.

    pip install ./examples/selection_policy
    kvgraft generate --selection last_k "first prompt" "second prompt"

Once it is installed, every engine knows it by its name: `kvgraft serve --selection last_k`, vLLM's
`kv_connector_extra_config`, SGLang's `KVGRAFT_SELECTION`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvgraft.graft.select import Recompute, SelectionContext, SelectionPolicy, SelectionSteps


@dataclass(frozen=True, slots=True)
class LastK(SelectionPolicy):
    """Compute the last `k` tokens of each run again."""

    name: ClassVar[str] = "last_k"
    k: int = 8

    @property
    def recompute_ratio(self) -> float:
        """Share of reused tokens that the planner expects to pay for."""
        return 0.02

    def steps(self, context: SelectionContext) -> SelectionSteps:
        """Choose in one step; a policy that looks at attention first would yield twice."""
        runs = np.split(context.reused, context.run_starts[1:])
        yield Recompute(np.concatenate([run[-self.k :] for run in runs]))
