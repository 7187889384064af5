"""K/V of another text for a request that asked for it: found among stored prefixes, kept until they are copied."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.donors import Donor
from kvgraft.engine.kv_space import SlotKV
from kvgraft.graft.select import NoRecompute
from kvgraft.prefix import RadixKey
from kvgraft.types import STAND_IN, GraftPlan, Match

if TYPE_CHECKING:
    from kvgraft.engine.kv_space import KVSpace
    from kvgraft.engine.request_kv import RequestKV
    from kvgraft.reuse.substitute import Substitutes
    from kvgraft.types import Miss


@dataclass(frozen=True, slots=True)
class StandIns:
    """Lets stored prefixes of other texts stand in where a semantic provider names them. Not thread-safe."""

    space: KVSpace
    substitutes: Substitutes

    def take(self, kv: RequestKV, planned: GraftPlan | Miss) -> bool:
        """Plan to copy what the provider names, behind the exact prefix and under a lock; False if that gains too little.

        Args:
            kv: Of a request that asks for it. Whoever unpins its donors unlocks the prefix.
            planned: What verified matches give.
        """
        request, exact_len = kv.request, kv.plan.exact_len
        reused_len = planned.reused_len if isinstance(planned, GraftPlan) else 0
        proposal = self.substitutes.propose(request.request_id, request.token_ids, exact_len, reused_len)
        if proposal is None:
            return False
        # Under the request's own namespace: a text of another tenant is not there.
        found = self.space.match(RadixKey(proposal.token_ids, kv.namespace.key))
        length = found.prefix_len
        if not self.substitutes.realised(proposal, length):
            return False
        kv.stand_in_lock = self.space.lock(found.handle)
        donor = Donor(STAND_IN, kv.namespace, proposal.token_ids[:length].astype(np.int32), SlotKV(found.kv_indices))
        span = Match(exact_len, STAND_IN, exact_len, length - exact_len)
        kv.plan, kv.donors = GraftPlan.over(kv.plan.num_tokens, exact_len, [span]), (donor,)
        kv.request = replace(request, policy=NoRecompute(), correction=None)
        kv.substitution = proposal.source
        return True
