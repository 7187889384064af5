"""Recompute tokens at random: the baseline that every ranking has to beat, and an unbiased sample of each run's drift."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvgraft.graft.select.base import Recompute, SelectionContext, SelectionSteps
from kvgraft.graft.select.draw import drawn
from kvgraft.graft.select.ratio import RatioPolicy


@dataclass(frozen=True)
class RandomShare(RatioPolicy):
    """Recompute the share `ratio` of reused tokens, drawn by the prompt's tokens: the same ones every time."""

    name: ClassVar[str] = "random"
    ratio: float = 0.1

    def steps(self, context: SelectionContext) -> SelectionSteps:
        """Take one step with `ceil(ratio * num_reused)` positions, all of which may estimate drift."""
        positions = context.reused[drawn(context, self.budget(context))]
        yield Recompute(positions, sample=positions)
