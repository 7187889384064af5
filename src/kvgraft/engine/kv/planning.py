"""Decide what a request reuses: look up donors, let other text stand in, hold the risk. Copies and holds nothing."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from kvgraft.donors import CostModel
from kvgraft.errors import PolicyError
from kvgraft.graft.select import expected_share, looks_at_query, says_much_twice
from kvgraft.graft.steps import QUERY_ROWS
from kvgraft.reuse.classes import ReuseClass, reuse_class
from kvgraft.reuse.continuation import may_go_on
from kvgraft.reuse.decision import Decision
from kvgraft.reuse.failures import miss_of
from kvgraft.reuse.lineage import reused_span
from kvgraft.types import Fidelity, GraftPlan, Miss, MissReason, ReuseMode

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from kvgraft.donors import Donor
    from kvgraft.engine.kv.kv_space import KVSpace
    from kvgraft.engine.kv.substitutes import PrefixSubstitutes
    from kvgraft.engine.model.flops import ModelFlops
    from kvgraft.engine.requests.request import Request
    from kvgraft.engine.requests.risk import HeldRisk
    from kvgraft.reuse.lookup import Lookup
    from kvgraft.reuse.substitute import Substitutes
    from kvgraft.types import Match, Namespace

logger = logging.getLogger(__name__)

_FLOPS_PER_COPIED_BYTE = 30.0
"""A copied byte is read, rotated and written; processors and accelerators do 10-100 operations in that time."""
_FLOPS_PER_SPAN = 5e6
"""Bookkeeping of one more span: tens of microseconds."""


class Planner:
    """Makes the decision of each attempt. A failure is logged, counted in `num_errors` and becomes a miss. Not thread-safe.

    Attributes:
        flops: Cost of computing.
        lookup: Finds donors and plans grafts.
        refusal: Why K/V of this model must not be moved, or None.
        substitutes: Names other texts that may stand in; None for none.
    """

    def __init__(
        self,
        space: KVSpace,
        flops: ModelFlops,
        lookup: Lookup,
        risk: HeldRisk,
        *,
        refusal: str | None,
        substitutes: Substitutes | None,
    ) -> None:
        self.lookup = lookup
        self.substitutes = substitutes
        self._num_errors = 0
        self._space = space
        self.flops = flops
        self._risk = risk
        self.refusal = refusal
        self._substitutes = None if substitutes is None else _prefixes(space, substitutes)

    @property
    def num_errors(self) -> int:
        """Lookups, policies and calls of a semantic provider that failed and became misses."""
        substitutes = 0 if self.substitutes is None else self.substitutes.num_errors
        return self._num_errors + self.lookup.num_errors + substitutes

    def decide(
        self, request: Request, namespace: Namespace, num_tokens: int, prefix_len: int, *, goes_on: bool
    ) -> Decision:
        """Return what is reused of the first `num_tokens` of a prompt after its prefix.

        Some of that is approximate if the request `goes_on`. Nothing keeps donors from eviction: `Holdings.keep` follows at
        once.
        """
        decision = self._decided(request, namespace, num_tokens, prefix_len)
        goes_on = goes_on or any(span.fidelity is Fidelity.CONTINUED for span in decision.plan.spans)
        if not goes_on or decision.plan.has_shifted or decision.substitution is not None:
            return decision
        served = self._risk.serve(request, ReuseClass.CONTINUED)
        return replace(decision, risk=served.statement, sampled=served.sampled)

    def may_go_on(self, request: Request) -> bool:
        """Return whether a request takes approximate K/V that an earlier one has left in their places."""
        # Rows that heal beside decode steps would be written over what others go on from, too.
        is_left_alone = not request.repair.rows_per_step
        return may_go_on(request.reuse) and is_left_alone and self.refusal is None and self._risk.may_go_on(request)

    def _decided(self, request: Request, namespace: Namespace, num_tokens: int, prefix_len: int) -> Decision:
        costs = self._costs(request)
        if isinstance(costs, Miss):
            return Decision.to_compute(num_tokens, prefix_len, costs, risk=self._risk.stated(request))
        planned = self.lookup.find(
            namespace,
            request.token_ids,
            prefix_len,
            costs,
            read_cost=None if self._space.stores is None else self._space.stores.read_cost,
        ).planned
        if request.reuse is ReuseMode.SUBSTITUTE:
            decision = self._substituted(request, namespace, prefix_len, planned)
            if decision is not None:
                return decision
        if isinstance(planned, Miss):
            return Decision.to_compute(num_tokens, prefix_len, planned, risk=self._risk.stated(request))
        spans: list[tuple[Match, Donor, str]] = []
        for match in planned.spans:
            donor = self._space.donors.get(match.donor_id)
            if donor is None:  # a look for other text made room on the host
                miss = Miss(MissReason.NO_DONORS, "a donor left during the lookup")
                return Decision.to_compute(num_tokens, prefix_len, miss, risk=self._risk.stated(request))
            spans.append((match, donor, self._space.tier_of(donor)))
        return self._served(request, planned, spans)

    def without(self, request: Request, decision: Decision, lost: Collection[Match], miss: Miss) -> Decision:
        """Return the decision about those spans of `decision` that are not lost; without any, `miss`."""
        kept = [span for span in decision.spans() if span[0] not in lost]
        if not kept:
            return decision.given_up(miss)
        return self._served(request, decision.plan, kept)

    def policy_failed(self, request: Request, error: PolicyError) -> Miss:
        """Log and count the failure of a policy; returns the miss."""
        self._num_errors += 1
        logger.error("request %s is computed in full: %s", request.request_id, error, exc_info=error)
        return miss_of(error)

    def _substituted(
        self, request: Request, namespace: Namespace, prefix_len: int, planned: GraftPlan | Miss
    ) -> Decision | None:
        """Let another text stand in if that gains more; a failure is logged and counted, and gains nothing."""
        if self._substitutes is None:
            return None
        try:
            return self._substitutes.decide(request, namespace, prefix_len, planned, self._risk.stated(request))
        except Exception as error:
            self._space.doubt(error)
            self._num_errors += 1
            logger.exception("no other text stands in for request %s", request.request_id)
            return None

    def _served(self, request: Request, plan: GraftPlan, spans: Iterable[tuple[Match, Donor, str]]) -> Decision:
        """Decide how a graft of these spans of `plan` is served.

        Exact spans add no risk, and are copied even where the others must not be. Those that it goes on from are held as
        what the prefix cache has of that.
        """
        may_go_on = self._risk.may_go_on(request)
        spans = [span for span in spans if may_go_on or span[0].fidelity is not Fidelity.CONTINUED]
        risk, policy, sampled, waits = self._risk.stated(request), request.policy, None, False
        shifted = [reused_span(match, donor) for match, donor, _ in spans if match.is_shifted]
        if shifted:
            served = self._risk.serve(request, reuse_class(shifted))
            risk, sampled, waits = served.statement, served.sampled, served.waits
            if served.policy is not None:
                policy = served.policy
            else:
                spans = [span for span in spans if not span[0].is_shifted]
        if not spans:
            miss = Miss(MissReason.RISK, f"grafts of this kind are at notch {risk.notch!r}")
            return Decision.to_compute(plan.num_tokens, plan.prefix_len, miss, risk=risk)
        matches, donors, tiers = zip(*spans, strict=True)
        served_plan = GraftPlan.over(plan.num_tokens, plan.prefix_len, matches)
        if request.repairs_after:
            waits = waits or request.is_constrained or says_much_twice(request.token_ids, served_plan.shifted)
        return Decision(served_plan, None, donors, tiers, policy, request.correction, risk, sampled, waits)

    def _costs(self, request: Request) -> CostModel | Miss:
        """Return costs in floating-point operations, or why nothing may be grafted.

        Copying is memory traffic, converted by a typical ratio of the two.
        """
        if not request.reuse.grafts:
            return Miss(MissReason.REUSE_OFF)
        if self.refusal is not None:
            return Miss(MissReason.MODEL_REFUSED, self.refusal)
        try:
            return CostModel(
                compute_per_token=self.flops.per_token,
                attention_per_key=self.flops.per_visible_key,
                copy_per_token=self._space.pool.bytes_per_token * _FLOPS_PER_COPIED_BYTE,
                per_span=_FLOPS_PER_SPAN,
                recompute_ratio=expected_share(request.policy),
                query_rows=QUERY_ROWS if looks_at_query(request.policy) else 0,
            )
        except PolicyError as error:
            return self.policy_failed(request, error)


def _prefixes(space: KVSpace, provider: Substitutes) -> PrefixSubstitutes:
    """Return what finds other texts among prefixes; imported where a provider names some."""
    from kvgraft.engine.kv.substitutes import PrefixSubstitutes

    return PrefixSubstitutes(space, provider)
