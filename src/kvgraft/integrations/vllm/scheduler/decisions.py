"""Which graft a request gets, or why none: lookup, cost, other text, and what a store beside us has."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvgraft.donors import CostModel
from kvgraft.graft.select import expected_share, looks_at_query
from kvgraft.integrations.vllm.scheduler.claims import Claims
from kvgraft.integrations.vllm.scheduler.prefill_speed import PrefillSpeed
from kvgraft.integrations.vllm.scheduler.refused import refused_request
from kvgraft.integrations.vllm.scheduler.stand_ins import StandIns
from kvgraft.integrations.vllm.scheduler.stores import is_cold
from kvgraft.reuse.asked import PARAMETER, asked_mode
from kvgraft.reuse.lookup import Lookup, NearDonors
from kvgraft.types import GraftPlan, Miss, MissReason, ReuseMode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.request import Request

    from kvgraft.config.vllm import VLLMConfig
    from kvgraft.graft.select import SelectionPolicy
    from kvgraft.integrations.vllm.scheduler.claims import Claim
    from kvgraft.integrations.vllm.scheduler.counts import Counts
    from kvgraft.integrations.vllm.scheduler.donor_registry import DonorRegistry
    from kvgraft.integrations.vllm.scheduler.facts import EngineFacts
    from kvgraft.integrations.vllm.scheduler.requests import RequestState
    from kvgraft.integrations.vllm.scheduler.stored import StoredPrefix
    from kvgraft.types import Match

LEAST_DEADLINE_S = 2.0
"""Reads are given this long, however short they should be: a machine is busy now and then."""
_PATIENCE = 4
"""Beyond that, a read may take so many times what was expected, unless computing takes less."""
_MOST_PATIENCE_S = 30.0
"""And never longer, whatever is expected or not known."""


class Decisions:
    """Decides for one engine. Changes nothing but what it tells of the request."""

    def __init__(
        self,
        config: VLLMConfig,
        facts: EngineFacts,
        policy: SelectionPolicy,
        *,
        registry: DonorRegistry,
        counts: Counts,
        lookup: Lookup,
    ) -> None:
        self.speed = PrefillSpeed()
        self.stand_ins = StandIns.configured(config, facts, registry.catalogue)
        self._mode = config.mode
        self._min_saved_tokens = config.min_saved_tokens
        self._registry = registry
        self._counts = counts
        self._lookup = lookup
        self._costs = CostModel.of_width(
            facts.hidden_size, recompute_ratio=expected_share(policy), tail_passes=float(looks_at_query(policy))
        )
        self._claims = Claims(config, facts, policy, registry.catalogue)

    def claim_of(
        self, state: RequestState, request: Request, stored: StoredPrefix, refusal: str
    ) -> tuple[Claim | Miss, Sequence[Match]]:
        """The graft of a request or why there is none, and the text that donors have of it.

        Of a request that is computed, text that lies in a store alone does not count: what is computed anyhow becomes a donor
        nearer by.
        """
        mode, wrong = asked_mode((request.kv_transfer_params or {}).get(PARAMETER, self._mode), "kv_transfer_params")
        refusal = refusal or refused_request(request)
        if mode is ReuseMode.OFF:
            return Miss(MissReason.REUSE_OFF, wrong), ()
        if refusal:
            return Miss(MissReason.MODEL_REFUSED, refusal), ()
        state.captures = True
        prompt = state.token_ids[: state.num_prompt_tokens]
        exact_len = min(state.exact_len, len(prompt))  # of a request that begins again, an answer may be cached too
        read_cost = self._read_cost if self._registry.stores else None
        found = self._lookup.find(
            state.namespace,
            prompt,
            exact_len,
            self._costs,
            start=0,
            read_cost=read_cost,
            may_refresh=mode is ReuseMode.GRAFT,
        )
        state.lookup_ms = found.lookup_ms
        planned = found.planned
        if isinstance(planned, Miss) and planned.reason in (MissReason.ERROR, MissReason.POLICY_ERROR):
            self._counts.error()
        if mode is ReuseMode.EXACT:
            planned = Miss(MissReason.REUSE_OFF)
        elif state.failure is not None:
            is_policy_error = state.failure.reason is MissReason.POLICY_ERROR
            planned = state.failure if is_policy_error else Miss(MissReason.ERROR, "a graft of this request failed")
        elif mode is ReuseMode.SUBSTITUTE and self.stand_ins is not None:
            planned = self._substituted(self.stand_ins, state, exact_len, planned, stored.num_tokens)
        if isinstance(planned, GraftPlan) and self._is_better(stored, planned):
            planned, state.substitution = (
                Miss(MissReason.NOT_WORTH_IT, f"a store has {stored.num_tokens} exact tokens"),
                None,
            )
        claim = self._claims.of(planned, found.matches) if isinstance(planned, GraftPlan) else planned
        matches = found.matches
        if isinstance(claim, Miss):
            matches = tuple(match for match in matches if not self._is_cold(match))
        return claim, matches

    def reset(self) -> None:
        """All donors are forgotten."""
        self._lookup.reset()

    def deadline_s(self, claim: Claim) -> float:
        """Seconds that the reads of a claim may take."""
        cold = [span for span in claim.spans if self._is_cold(span)]
        expected_s = self._registry.stores.expected_s(sum(span.length for span in cold), len(cold))
        speed = self.speed.tokens_per_s
        limits = [_MOST_PATIENCE_S, _PATIENCE * expected_s]
        if speed is not None:
            limits.append(sum(span.length for span in cold) / speed)
        return max(LEAST_DEADLINE_S, min(limits))

    def _read_cost(self, match: Match) -> float:
        """Tokens that could be computed while a match is read; before any speed was measured, reading is tried."""
        if not self._is_cold(match):
            return 0.0
        read_s, speed = self._registry.stores.expected_s(match.length), self.speed.tokens_per_s
        if math.isinf(read_s):
            return read_s
        return 0.0 if speed is None else read_s * speed

    def _is_cold(self, match: Match) -> bool:
        donor = self._registry.catalogue.get(match.donor_id)
        return donor is not None and is_cold(donor)

    def _is_better(self, stored: StoredPrefix, plan: GraftPlan) -> bool:
        """Whether a store's exact tokens are preferred: a few more of them are not worth a graft."""
        saved = sum(span.length for span in plan.spans) - stored.num_tokens
        return stored.num_tokens > 0 and saved < max(1, self._min_saved_tokens)

    def _substituted(
        self, stand_ins: StandIns, state: RequestState, exact_len: int, planned: GraftPlan | Miss, num_stored: int
    ) -> GraftPlan | Miss:
        """Return the plan that copies another text if it gains more than `planned`, and than what a store has."""
        found = stand_ins.find(state, exact_len, planned, num_stored=num_stored)
        for _ in range(stand_ins.substitutes.take_errors()):
            self._counts.error()
        if found is None:
            return planned
        state.substitution = found.source
        return found.plan


def lookup_of(config: VLLMConfig, registry: DonorRegistry) -> Lookup:
    """The lookup that a configuration asks for."""
    return Lookup(
        registry.catalogue,
        min_run=config.min_run,
        max_generation=config.max_generation,
        min_saved_tokens=config.min_saved_tokens,
        refresh_after=config.refresh_after,
        deadline_ms=config.lookup_deadline_ms,
        near=NearDonors(registry.catalogue) if registry.stores else None,
    )
