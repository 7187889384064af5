"""The graft of a request, or why it gets none: lookup, cost, other text, and the exact tokens of a store beside us."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvgraft.donors import CostModel
from kvgraft.graft.select import expected_share, looks_at_query
from kvgraft.graft.steps import QUERY_ROWS
from kvgraft.integrations.vllm.scheduler.claims import Claims
from kvgraft.integrations.vllm.scheduler.refused import is_session, refused_request
from kvgraft.integrations.vllm.scheduler.stored import NOTHING_STORED, StoredPrefix
from kvgraft.reuse.asked import PARAMETER, REPAIR_PARAMETER, asked_mode, asked_repair
from kvgraft.reuse.claim import Claim
from kvgraft.reuse.continuation import may_go_on
from kvgraft.reuse.lookup import Lookup
from kvgraft.types import Miss, MissReason, RepairTime, ReuseMode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.request import Request

    from kvgraft.config.vllm import VLLMConfig
    from kvgraft.donors import DonorCatalogue
    from kvgraft.graft.select import SelectionPolicy
    from kvgraft.integrations.vllm.scheduler.counts import Counts
    from kvgraft.integrations.vllm.scheduler.donor_registry import DonorRegistry
    from kvgraft.integrations.vllm.scheduler.facts import EngineFacts
    from kvgraft.integrations.vllm.scheduler.substitutes import DonorSubstitutes
    from kvgraft.reuse.attempt import AskedPrompt
    from kvgraft.reuse.lookup import Found
    from kvgraft.types import GraftPlan, Match


class _Asked(NamedTuple):
    """What a request may reuse, when the policy's choice is computed, and whether the first token decides its answer."""

    mode: ReuseMode
    repair: RepairTime
    is_constrained: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Decided:
    """The answer to a lookup.

    Attributes:
        graft: The graft that is promised, or why there is none.
        lookup_ms: Duration of the lookup.
        keeps_text: The request's text may become donors.
        stored: Exact tokens that another connector's store loads; nothing where a graft is claimed.
    """

    graft: Claim | Miss
    lookup_ms: float = 0.0
    keeps_text: bool = False
    stored: StoredPrefix = NOTHING_STORED


class Decisions:
    """Decides for one engine. Changes nothing but counts."""

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
        self._stores = registry.stores
        self.substitutes = _substitutes(config, facts, registry.catalogue)
        self._mode = config.mode
        self._min_saved_tokens = config.min_saved_tokens
        self._counts = counts
        self._lookup = lookup
        self._repair = config.repair
        self._config, self._facts, self._catalogue = config, facts, registry.catalogue
        self.choose_by(policy)

    def choose_by(self, policy: SelectionPolicy) -> None:
        """Have a policy choose what is computed again, from the next lookup on."""
        self._costs = costs_of(self._facts, policy)
        self._claims = Claims(self._config, self._facts, policy, self._catalogue, self._stores.tier_of)

    def decide(
        self, prompt: AskedPrompt, request: Request, stored: StoredPrefix, *, refusal: str, failure: Miss | None
    ) -> tuple[Decided, Sequence[Match]]:
        """Return the graft of a request or why there is none, and the text that donors have of it.

        Of a request that is computed, text that lies in a store alone does not count: what is computed anyhow becomes a donor
        nearer by. `refusal` is why nothing is grafted on this engine, `failure` why an earlier graft of the request failed.
        """
        asked, wrong = self._asked(request)
        refusal = refusal or refused_request(request)
        if asked.mode is ReuseMode.OFF:
            return Decided(Miss(MissReason.REUSE_OFF, wrong), stored=stored), ()
        if refusal:
            return Decided(Miss(MissReason.MODEL_REFUSED, refusal), stored=stored), ()
        found = self._found(prompt)
        graft = self._graft(prompt, found, asked, stored, failure)
        if isinstance(graft, Claim):
            return Decided(graft, found.lookup_ms, keeps_text=True), found.matches
        matches = tuple(match for match in found.matches if not self._stores.donors.is_read(match))
        return Decided(graft, found.lookup_ms, stored.asynchronous, stored), matches

    def may_go_on(self, request: Request) -> bool:
        """Return whether a request takes approximate K/V that an earlier one has left in their places."""
        return may_go_on(self._asked(request)[0].mode) and not refused_request(request) and not is_session(request)

    def _asked(self, request: Request) -> tuple[_Asked, str]:
        """Return what a request asks for, and what is wrong with that; what is wrong reuses nothing."""
        given, field = request.kv_transfer_params or {}, "kv_transfer_params"
        mode, wrong = asked_mode(given.get(PARAMETER, self._mode), field)
        repair, wrong_time = asked_repair(given.get(REPAIR_PARAMETER, self._repair), field)
        rule = getattr(request.sampling_params, "structured_outputs", None)
        is_constrained = rule is not None and bool(rule.choice or rule.regex or rule.grammar)
        return _Asked(ReuseMode.OFF if wrong_time else mode, repair, is_constrained), wrong or wrong_time

    def _found(self, prompt: AskedPrompt) -> Found:
        found = self._lookup.find(
            prompt.namespace,
            prompt.text,
            prompt.prefix_len,
            self._costs,
            start=0,
            read_cost=self._stores.terms.cost if self._stores else None,
        )
        planned = found.planned
        if isinstance(planned, Miss) and planned.reason in (MissReason.ERROR, MissReason.POLICY_ERROR):
            self._counts.error()
        return found

    def _graft(
        self, prompt: AskedPrompt, found: Found, asked: _Asked, stored: StoredPrefix, failure: Miss | None
    ) -> Claim | Miss:
        """Choose between the plan, other text and a store's exact tokens, and claim what is chosen."""
        planned, substitution = found.planned, None
        if asked.mode is ReuseMode.EXACT:
            return Miss(MissReason.REUSE_OFF)
        if failure is not None:
            is_policy_error = failure.reason is MissReason.POLICY_ERROR
            return failure if is_policy_error else Miss(MissReason.ERROR, "a graft of this request failed")
        if asked.mode is ReuseMode.SUBSTITUTE and self.substitutes is not None:
            other = self.substitutes.find(prompt, planned, num_stored=stored.num_tokens)
            self._counts.semantic(self.substitutes.provider.take_outcomes())
            planned, substitution = other or (planned, None)
        if isinstance(planned, Miss):
            return planned
        if self._is_better(stored, planned):
            return Miss(MissReason.NOT_WORTH_IT, f"a store has {stored.num_tokens} exact tokens")
        if substitution is not None:
            return self._claims.of(planned, prompt.text, found.matches, substitution)
        repair = self._claims.repair_times.of(
            planned,
            prompt.text,
            asked.repair,
            max_tokens=prompt.max_tokens,
            num_generated=prompt.num_generated,
            is_constrained=asked.is_constrained,
        )
        return self._claims.of(planned, prompt.text, found.matches, repair=repair)

    def deadline_s(self, claim: Claim) -> float:
        """Return the seconds that the reads of a claim may take."""
        stored = [span for span in claim.spans if self._stores.donors.is_read(span)]
        return self._stores.terms.patience_s(stored, sum(span.length for span in stored))

    def _is_better(self, stored: StoredPrefix, plan: GraftPlan) -> bool:
        """Whether a store's exact tokens are preferred: a few more of them are not worth a graft."""
        saved = sum(span.length for span in plan.spans) - stored.num_tokens
        return stored.num_tokens > 0 and saved < max(1, self._min_saved_tokens)


def _substitutes(config: VLLMConfig, facts: EngineFacts, catalogue: DonorCatalogue) -> DonorSubstitutes | None:
    """Return what names other texts; nothing of that is imported where no provider is set."""
    if not config.semantic_provider:
        return None
    from kvgraft.integrations.vllm.scheduler.substitutes import DonorSubstitutes

    return DonorSubstitutes.configured(config, facts, catalogue)


def costs_of(facts: EngineFacts, policy: SelectionPolicy) -> CostModel:
    """Return what copying and computing cost on an engine; the question's rows are run once more after what is chosen."""
    rows = QUERY_ROWS if looks_at_query(policy) else 0
    return CostModel.of_width(facts.hidden_size, recompute_ratio=expected_share(policy), query_rows=rows)


def lookup_of(config: VLLMConfig, registry: DonorRegistry) -> Lookup:
    """The lookup that a configuration asks for."""
    return Lookup(
        registry.catalogue,
        min_run=config.min_run,
        max_generation=config.max_generation,
        min_saved_tokens=config.min_saved_tokens,
        deadline_ms=config.lookup_deadline_ms,
    )
