"""Rules of a request's repair: when it comes, which first tokens wait for it, and which rows go on from there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.types import RepairTime

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from kvgraft.config import EngineConfig
    from kvgraft.reuse.lineage import Lineage


@dataclass(frozen=True, slots=True)
class RepairRules:
    """When the choice of a request's policy is computed.

    Attributes:
        time: Before the first token or after it.
        below_margin: A first token whose probability exceeds the next one's by less waits for the repair; 0 for none.
        rows_per_step: Rows that each decode step computes exactly besides its own; 0 for none.
    """

    time: RepairTime = RepairTime.BEFORE
    below_margin: float = 0.0
    rows_per_step: int = 0

    @classmethod
    def configured(cls, config: EngineConfig) -> RepairRules:
        """Return the rules of the settings."""
        return cls(RepairTime(config.repair), config.repair_below_margin, config.repair_rows)

    def reason_to_wait(self, logits: Tensor) -> str:
        """Return why the first token should wait for the repair, empty if it may be drawn from `logits` (vocab_size,)."""
        if not self.below_margin:
            return ""
        first, second = logits.softmax(-1).topk(2).values.tolist()
        if first - second >= self.below_margin:
            return ""
        return f"the first token was likelier than the next one by {first - second:.3f} only"

    def exact_rows(self, lineage: Lineage, position: int) -> NDArray[np.int64]:
        """Return the positions before the decode row at `position` that its step computes once more, in causal order.

        They follow the exact frontier, so that they attend to nothing approximate.
        """
        frontier = lineage.exact_len(position)
        return np.arange(frontier, min(frontier + self.rows_per_step, position))
