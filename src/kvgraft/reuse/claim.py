"""A graft that is promised to an engine, which counts on its tokens from then on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvgraft.reuse.lineage import copied_generation
from kvgraft.types import RepairTime

if TYPE_CHECKING:
    from kvgraft.donors import Donor
    from kvgraft.reuse.decision import Decision
    from kvgraft.reuse.repair_time import RepairPlan
    from kvgraft.types import GraftPlan, Match

_RESIDENT = "host"
"""Tier of K/V that need not be read from a store."""


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """A graft that is promised.

    Attributes:
        decision: What is copied for the prompt, and from which donors.
        end: Positions `[plan.prefix_len, end)` are made for the engine.
        front: Spans of text that sliding windows reach back to; they are read, too.
        front_donors: One per entry of `front`.
        first_approximate: Positions before it are exact, and stay so if the copy fails.
        asynchronous: The request waits for it.
        num_rows: Positions that are computed for it before the engine goes on at `end`, as far as is known now.
        repair: When the policy's choice is computed; None if there is none.
        num_repair_rows: Positions that are computed with the second token, as far as is known now.
    """

    decision: Decision
    end: int
    front: tuple[Match, ...]
    front_donors: tuple[Donor, ...]
    first_approximate: int
    asynchronous: bool
    num_rows: int
    repair: RepairPlan | None = None
    num_repair_rows: int = 0

    @property
    def plan(self) -> GraftPlan:
        """Spans and computed positions of the prompt."""
        return self.decision.plan

    @property
    def spans(self) -> tuple[Match, ...]:
        """Spans that are read of donors."""
        return (*self.front, *self.plan.spans)

    @property
    def donors(self) -> tuple[Donor, ...]:
        """One per entry of `spans`."""
        return (*self.front_donors, *self.decision.donors)

    @property
    def repairs_after(self) -> bool:
        """Whether what the policy chooses is computed with the second token."""
        return self.repair is not None and self.repair.time is RepairTime.AFTER

    @property
    def num_tokens(self) -> int:
        """Tokens that are promised."""
        return self.end - self.plan.prefix_len

    @property
    def num_gap_tokens(self) -> int:
        """Promised tokens that are computed, not copied."""
        return self.num_tokens - sum(span.length for span in self.plan.spans)

    @property
    def generation(self) -> int:
        """Highest generation of what it copies, and of what attends to that; 0 where all of that is exact."""
        return max(self.front_generation, *map(copied_generation, self.plan.spans))

    @property
    def front_generation(self) -> int:
        """Highest generation of windows that donors give before the prompt's prefix ends; 0 where none do."""
        return max([1, *map(copied_generation, self.front)]) if self.front else 0

    @property
    def num_stored_tokens(self) -> int:
        """Tokens of the plan that are read from stores."""
        return sum(span.length for span, _, tier in self.decision.spans() if tier != _RESIDENT)

    @property
    def source_starts(self) -> tuple[int, ...]:
        """Per entry of `spans` the position at which its first token was encoded."""
        return tuple(d.start_position + s.donor_start for s, d in zip(self.spans, self.donors, strict=True))

    def lying_in(self, tiers: tuple[str, ...]) -> Claim:
        """Return the claim with the tiers in which the donors of its decision lie now."""
        return replace(self, decision=replace(self.decision, tiers=tiers))
