"""Another text's K/V for a request that asks for them: a stored prefix that a semantic provider names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.donors import Donor
from kvgraft.engine.kv.kv_space import PrefixKV
from kvgraft.graft.select import NoRecompute
from kvgraft.reuse.decision import Decision
from kvgraft.token_key import RadixKey
from kvgraft.types import STAND_IN, GraftPlan, Match

if TYPE_CHECKING:
    from kvgraft.engine.kv.kv_space import KVSpace
    from kvgraft.engine.requests.request import Request
    from kvgraft.reuse.substitute import Substitutes
    from kvgraft.types import Miss, Namespace, RiskStatement


@dataclass(frozen=True, slots=True)
class PrefixSubstitutes:
    """Lets stored prefixes of other texts stand in where a semantic provider names them. Not thread-safe."""

    space: KVSpace
    provider: Substitutes

    def decide(
        self,
        request: Request,
        namespace: Namespace,
        prefix_len: int,
        planned: GraftPlan | Miss,
        risk: RiskStatement,
    ) -> Decision | None:
        """Return the decision to copy what the provider names after the prefix; None if that gains too little.

        Args:
            request: Asks for it.
            namespace: Of the request: a text of another tenant is not there.
            prefix_len: Tokens of the exact prefix.
            planned: Graft of equal text, or why there is none.
            risk: Statement of a request without a graft.
        """
        reused_len = planned.reused_len if isinstance(planned, GraftPlan) else 0
        proposal = self.provider.propose(request.request_id, request.token_ids, prefix_len, reused_len)
        if proposal is None:
            return None
        found = self.space.match(RadixKey(proposal.token_ids, namespace.key))
        length = found.prefix_len
        if not self.provider.realised(proposal, length):
            return None
        kv = PrefixKV(found.kv_indices, found.handle)
        donor = Donor(STAND_IN, namespace, proposal.token_ids[:length].astype(np.int32), kv)
        span = Match(prefix_len, STAND_IN, prefix_len, length - prefix_len)
        return Decision(
            GraftPlan.over(len(request.token_ids), prefix_len, [span]),
            donors=(donor,),
            tiers=(self.space.tier_of(donor),),
            policy=NoRecompute(),
            risk=risk,
            substitution=proposal.source,
        )
