"""Recompute nothing: the fastest and least faithful policy, and the baseline for the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvgraft.graft.select.base import Recompute, SelectionContext, SelectionPolicy, SelectionSteps


@dataclass(frozen=True)
class NoRecompute(SelectionPolicy):
    """Keep every reused token as it is."""

    name: ClassVar[str] = "none"

    @property
    def recompute_ratio(self) -> float:
        """0: nothing that is reused is computed again."""
        return 0.0

    def steps(self, context: SelectionContext) -> SelectionSteps:
        """Take one step that chooses nothing."""
        yield Recompute(context.reused[:0])
