"""The decision about one attempt of a request: what is reused, from where and under which policy, or why nothing is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvgraft.types import UNCALIBRATED, GraftPlan, RepairTime

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvgraft.donors import Donor
    from kvgraft.graft.drift import DriftCorrection
    from kvgraft.graft.select import SelectionPolicy
    from kvgraft.types import Match, Miss, RiskStatement, Substitution


@dataclass(frozen=True, slots=True)
class Sampled:
    """A request chosen for an audit, before anything of its answer was known.

    Attributes:
        reuse_class: Of its graft.
        notch: Index of the notch that serves it.
        repair: When its policy's choice is computed, so that its answer has parts that are judged apart.
    """

    reuse_class: str
    notch: int
    repair: RepairTime = RepairTime.BEFORE


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """A graft and all that depends on it, or a miss. Replaced whole: what changes the plan makes another decision.

    Invariants (verified on construction): `donors` and `tiers` name one of each span, and a miss has no span and no
    substitution.

    Attributes:
        plan: Positions that are reused and computed. Of a miss it computes everything after the prefix.
        miss: Why nothing is grafted; None where something is.
        donors: Owners of the K/V, by span of the plan.
        tiers: Where these K/V lie, by span (`SpanReport.tier`).
        policy: Chooses reused tokens to compute again; None for none.
        correction: Of the drift of tokens that are not chosen.
        risk: Statement about grafts of this kind.
        sampled: Set if the answer is to be audited.
        waits: Whether the first token waits for the policy's choice though the request did not ask for that.
        substitution: Set if the spans are another text's.
    """

    plan: GraftPlan
    miss: Miss | None = None
    donors: tuple[Donor, ...] = ()
    tiers: tuple[str, ...] = ()
    policy: SelectionPolicy | None = None
    correction: DriftCorrection | None = None
    risk: RiskStatement = UNCALIBRATED
    sampled: Sampled | None = None
    waits: bool = False
    substitution: Substitution | None = None

    def __post_init__(self) -> None:
        assert len(self.plan.spans) == len(self.donors) == len(self.tiers), "a donor and a tier for each span"
        assert (self.miss is None) == bool(self.plan.spans), "a graft or a miss"
        assert self.miss is None or self.substitution is None, "a miss is nothing else"

    @classmethod
    def to_compute(
        cls, num_tokens: int, prefix_len: int, miss: Miss, *, risk: RiskStatement = UNCALIBRATED
    ) -> Decision:
        """Return the decision to compute a prompt of `num_tokens` after its prefix."""
        return cls(GraftPlan.over(num_tokens, prefix_len), miss, risk=risk)

    def spans(self) -> Iterator[tuple[Match, Donor, str]]:
        """Yield match, donor and tier of each span."""
        return zip(self.plan.spans, self.donors, self.tiers, strict=True)

    def given_up(self, miss: Miss) -> Decision:
        """Return the decision to compute everything after the prefix, because of `miss`.

        Policy, correction and risk stay: rows that the policy asked for by now were computed.
        """
        plan = GraftPlan.over(self.plan.num_tokens, self.plan.prefix_len)
        return Decision(plan, miss, policy=self.policy, correction=self.correction, risk=self.risk)
