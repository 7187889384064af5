"""Recompute the head of every run.

Source: EPIC (LegoLink), https://arxiv.org/abs/2410.15332: a chunk that was encoded at the start of something acts as an
attention sink; computing its first tokens again repairs most of that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvgraft.errors import ConfigError
from kvgraft.graft.select.base import Recompute, SelectionContext, SelectionPolicy, SelectionSteps

_TYPICAL_RUN_TOKENS = 256
"""Run length for which the expected share is stated; the planner only needs the order of magnitude."""


@dataclass(frozen=True)
class FirstK(SelectionPolicy):
    """Recompute the first `k` tokens of each run."""

    name: ClassVar[str] = "first_k"
    k: int = 16

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ConfigError(f"first_k needs k >= 1, not {self.k}; use the policy 'none' to recompute nothing")

    @property
    def recompute_ratio(self) -> float:
        """`k` over the length of a typical run."""
        return min(1.0, self.k / _TYPICAL_RUN_TOKENS)

    def steps(self, context: SelectionContext) -> SelectionSteps:
        """Take one step with the first `k` positions of each run."""
        positions = context.reused[context.seam_distance < self.k]
        yield Recompute(positions, sample=positions)
