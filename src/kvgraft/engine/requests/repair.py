"""Rules of a request's repair: when it comes, which first tokens wait for it, and which rows go on from there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.types import RepairTime

if TYPE_CHECKING:
    from numpy.typing import NDArray

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

    def exact_rows(self, lineage: Lineage, position: int) -> NDArray[np.int64]:
        """Return the positions before the decode row at `position` that its step computes once more, in causal order.

        They follow the exact frontier, so that they attend to nothing approximate.
        """
        frontier = lineage.exact_len(position)
        return np.arange(frontier, min(frontier + self.rows_per_step, position))
