"""The half of the connector beside vLLM's scheduler: lookups, claims, commands to workers, reports to users."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.errors import CorruptCacheError
from kvgraft.integrations.vllm.messages import StepCommands
from kvgraft.integrations.vllm.scheduler.captures import Captures
from kvgraft.integrations.vllm.scheduler.counts import Counts
from kvgraft.integrations.vllm.scheduler.decisions import Decisions, lookup_of
from kvgraft.integrations.vllm.scheduler.donor_registry import DonorRegistry
from kvgraft.integrations.vllm.scheduler.grafts import graft_of
from kvgraft.integrations.vllm.scheduler.namespaces import namespace_of
from kvgraft.integrations.vllm.scheduler.private_hashes import make_private
from kvgraft.integrations.vllm.scheduler.requests import RequestState
from kvgraft.integrations.vllm.scheduler.stored import NOTHING_STORED
from kvgraft.integrations.vllm.selection import chosen_policy
from kvgraft.memory.store import open_stores
from kvgraft.reuse.asked import PARAMETER
from kvgraft.reuse.failures import miss_of
from kvgraft.reuse.lineage import Lineage, reused_span
from kvgraft.reuse.report import report_as_dict
from kvgraft.types import Miss, MissReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvgraft.config.vllm import VLLMConfig
    from kvgraft.integrations.vllm.messages import Capture, Graft, GraftOutcome, StoreReport, WorkerReport
    from kvgraft.integrations.vllm.scheduler.claims import Claim
    from kvgraft.integrations.vllm.scheduler.facts import EngineFacts
    from kvgraft.integrations.vllm.scheduler.stored import StoredPrefix

logger = logging.getLogger(__name__)


class GraftScheduler:
    """Sees every request from its first lookup to its end. Not thread-safe.

    Nothing that happens here fails a request: whatever goes wrong is logged, counted and becomes a miss.
    """

    def __init__(self, config: VLLMConfig, facts: EngineFacts) -> None:
        self.counts = Counts()
        self.host_bytes = 0
        self.host_limit_bytes = config.host_bytes
        self.registry = DonorRegistry(
            facts.capacity_tokens,
            min_run=config.min_run,
            max_generation=config.max_generation,
            host_tokens=facts.host_tokens,
            stores=() if facts.refusal else open_stores(config.store),
            num_ranks=facts.num_ranks,
        )
        self._facts = facts
        self._refusal = facts.refusal
        self._policy = chosen_policy(config)
        self._lookup = lookup_of(config, self.registry)
        self._decisions = Decisions(
            config, facts, self._policy, registry=self.registry, counts=self.counts, lookup=self._lookup
        )
        self._stand_ins = self._decisions.stand_ins
        self._captures = Captures(self.registry, facts)
        self._states: dict[str, RequestState] = {}
        self._ended: dict[str, RequestState] = {}
        self._grafts: list[Graft] = []
        self._cancels: list[str] = []
        self._is_reset = False
        self._known_changes = 0

    @property
    def refusal(self) -> str:
        """Why nothing is grafted on this engine, or empty."""
        return self._refusal

    @property
    def trusts_prefixes(self) -> bool:
        """Whether what vLLM's prefix cache holds was computed by the model as it is now."""
        return self._captures.trusts_prefixes

    @property
    def num_states(self) -> int:
        """Requests that are remembered."""
        return len(self._states) + len(self._ended)

    # ---- what vLLM asks and tells

    def match(self, request: Request, exact_len: int, stored: StoredPrefix = NOTHING_STORED) -> tuple[int, bool]:
        """Decide how many tokens behind vLLM's own `exact_len` are made here, and whether the request waits for them.

        None are unless a graft reuses `min_saved_tokens` more than a store beside us has exact ones.
        """
        known = self._states.get(request.request_id)
        if known is not None and known.stored == stored and known.waits_for_room(exact_len, request.num_tokens):
            return _promised(known)
        try:
            self._decide(self._begin(request, exact_len, known), request, stored)
        except Exception as error:
            self.counts.error()
            logger.exception("lookup for request %s failed; it is computed", request.request_id)
            self._compute(request.request_id, miss_of(error))
        return _promised(self._states.get(request.request_id))

    def admit(self, request: Request, block_ids: Sequence[Sequence[int]], num_tokens: int) -> None:
        """Take the blocks of a request; vLLM calls this a second time with 0 tokens for asynchronous claims.

        It may come steps behind `match`, or never. What was found may be gone then: vLLM waits for a load all the same, which
        fails at once.
        """
        state = self._states.get(request.request_id)
        if state is None or (state.is_admitted and not num_tokens):
            return
        state.is_admitted = True
        if not num_tokens:
            if state.claim is not None:
                self._unpin(state)
                state.claim = None
                state.miss = Miss(MissReason.NO_ROOM, "vLLM admitted the request without its graft")
            return
        if state.claim is None and state.void is None:
            return
        state.block_ids = [list(ids) for ids in block_ids]
        if state.claim is None or state.claim.num_tokens != num_tokens:
            self._send_void(state)
        else:
            self._send(state, state.claim)

    def _send(self, state: RequestState, claim: Claim) -> None:
        """Have a claim carried out."""
        spans = zip(claim.plan.spans, claim.donors[len(claim.reached_back) :], strict=True)
        is_substituted, tier_of = state.substitution is not None, self.registry.stores.tier_of
        state.lineage.copy(
            reused_span(span, donor, tier=tier_of(donor.donor_id), is_substituted=is_substituted)
            for span, donor in spans
        )
        if claim.reached_back:
            state.lineage.expose(claim.plan.exact_len, max(donor.generation for donor in claim.reached_back))
        try:
            self._captures.open_behind_graft(state, claim)
        except Exception:
            # The graft itself must go out: vLLM counts its tokens as computed.
            self.counts.error()
            logger.exception("text of request %s is not kept for others", state.request_id)
        deadline_s = self._decisions.deadline_s(claim)
        graft = graft_of(state, claim, self.registry, self._facts.block_sizes, deadline_s=deadline_s)
        self._grafts.append(graft)
        state.cold_tokens = sum(span.length for span in claim.plan.spans if span.donor_id in graft.cold)
        for span in claim.plan.spans:
            self.registry.catalogue.record_hit(span.donor_id, span.length)
        self.registry.stores.touch(donor.donor_id for donor in claim.donors)

    def _send_void(self, state: RequestState) -> None:
        """Let a load fail that vLLM waits for: what was found is gone, or vLLM takes less than it was promised."""
        self._unpin(state)
        reason = (
            "donors were forgotten before the request was admitted" if state.claim is None else "vLLM cut the graft"
        )
        state.claim = state.claim or state.void
        assert state.claim is not None
        self._grafts.append(
            graft_of(state, state.claim, self.registry, self._facts.block_sizes, deadline_s=0.0, void=reason)
        )

    def sources(self, request_id: str, num_tokens: int) -> dict[str, int]:
        """Where the tokens promised for a request come from, under vLLM's names."""
        state = self._states.get(request_id)
        claim = None if state is None else state.claim
        if state is None or claim is None or claim.num_tokens != num_tokens:
            return {"external_unspecified": num_tokens}
        spans = sum(span.length for span in claim.plan.spans)
        far = "disk" if self.registry.stores.are_files else "external_unspecified"
        sources = {"host": spans - state.cold_tokens, "external_unspecified": num_tokens - spans}
        return {**sources, far: sources.get(far, 0) + state.cold_tokens}

    def commands(self, output: SchedulerOutput) -> StepCommands:
        """What workers do in this step."""
        self.registry.follow_stores()
        for req_id in output.preempted_req_ids or ():
            preempted = self._states.get(req_id)
            if preempted is not None and preempted.hashes is not None:
                preempted.hashes.renew()  # it must not find its own approximate blocks and take them for exact
        captures: list[Capture] = []
        for new in output.scheduled_new_reqs:
            state = self._states.get(new.req_id)
            if state is not None:
                state.add_blocks(new.block_ids, replace=True)
                captures += self._due(state, new.num_computed_tokens + output.num_scheduled_tokens[new.req_id])
        running = output.scheduled_cached_reqs
        for req_id, blocks, computed in zip(
            running.req_ids, running.new_block_ids, running.num_computed_tokens, strict=True
        ):
            state = self._states.get(req_id)
            if state is not None:
                state.add_blocks(blocks, replace=req_id in running.resumed_req_ids)
                captures += self._due(state, computed + output.num_scheduled_tokens[req_id])
        for graft in self._grafts:
            state = self._states.get(graft.request_id)
            if state is not None and not graft.asynchronous:
                self._unpin(state)
        grafts, self._grafts = tuple(self._grafts), []
        cancels, self._cancels = tuple(self._cancels), []
        reset, self._is_reset = self._is_reset, False
        seals, discards, drops = self.registry.take_news()
        num_tokens = sum(output.num_scheduled_tokens.values())
        is_prefill_alone = not any(state.waits_for_graft for state in self._states.values())
        self._decisions.speed.step_begins(num_tokens, is_prefill_alone=is_prefill_alone)
        return StepCommands(
            reset,
            cancels,
            seals,
            grafts,
            discards,
            drops,
            tuple(captures),
            self.registry.take_writes(),
            is_idle=not num_tokens,
            known_changes=self._known_changes,
        )

    def step_ended(self) -> None:
        """The result of a step has come back."""
        self._decisions.speed.step_ends()

    def receive(self, report: WorkerReport) -> None:
        """Take what workers told."""
        self.host_bytes = report.host_bytes
        if report.refusal and not self._refusal:
            self._refusal = report.refusal
            logger.error("workers refuse to graft: %s", report.refusal)
        if report.num_weight_changes > self._known_changes:
            self._known_changes = report.num_weight_changes
            self._captures.trusts_prefixes = False
            self._forget_everything()
            logger.warning(
                "weights were changed in place: donors are forgotten; vLLM's own prefix cache is not, until "
                "reset_prefix_cache(reset_connector=True) is called"
            )
        for donor_id in report.lost_donors:
            self.registry.forget(donor_id)
        if report.lost_texts:
            for state in (*self._states.values(), *self._ended.values()):
                self._captures.lose(state, report.lost_texts)
        for request_id, outcome in report.outcomes.items():
            ended = self._ended.pop(request_id, None) or self._states.get(request_id)
            if ended is not None:
                self._complete(ended, outcome)
        self._follow_stores(report.store)

    def finish(self, request: Request) -> dict[str, object] | None:
        """Forget a request that ended, however; returns what the client is told."""
        state = self._states.pop(request.request_id, None)
        if state is None:
            return None
        claim = state.claim if state.waits_for_graft else None
        if claim is not None and claim.asynchronous:
            self._cancels.append(state.request_id)  # first of all: vLLM waits for it to free the blocks
        try:
            self._unpin(state)
            self._captures.end(state, np.asarray(request.all_token_ids, np.int32))
            if self._stand_ins is not None and state.captures:
                self._stand_ins.heard(state, request.all_token_ids[: request.num_computed_tokens])
        except Exception:
            self.counts.error()
            logger.exception("text of request %s is not kept for others", state.request_id)
        if claim is not None and not claim.asynchronous:
            self._ended[state.request_id] = state  # its outcome comes behind its last token
        else:
            self._captures.give_up(state)
        report = state.report(self._policy.name)
        self.counts.request(report)
        return {PARAMETER: report_as_dict(report)}

    def reset(self, *, prefixes_are_gone: bool) -> None:
        """Forget everything that was ever computed: the model may be another one from now on.

        Requests that run go on and give nothing to others; those that wait are looked up anew. Workers forget too, before
        anything else that they are told from now on, and give up grafts that are under way.

        Args:
            prefixes_are_gone: vLLM reset its own prefix cache too; where that has what the old model computed, nothing
                behind its hits is captured.
        """
        logger.info("all donors are forgotten: the caches were reset")
        self._is_reset = True
        self._captures.trusts_prefixes = prefixes_are_gone
        self._forget_everything()

    def close(self) -> None:
        """Let stores and a semantic provider give back their resources."""
        self.registry.stores.close()
        if self._stand_ins is not None:
            self._stand_ins.substitutes.close()

    def check(self) -> None:
        """Verify what must hold between two calls of vLLM; for tests.

        Raises:
            CorruptCacheError: It does not.
        """
        states = [*self._states.values(), *self._ended.values()]
        self.registry.check({text.text_id for state in states for text in state.texts})
        pinned = {d.donor_id for s in states if s.is_pinned and s.claim is not None for d in s.claim.donors}
        catalogue = self.registry.catalogue
        wrong = [
            donor.donor_id for donor in catalogue if catalogue.is_pinned(donor.donor_id) != (donor.donor_id in pinned)
        ]
        if wrong:
            raise CorruptCacheError(f"donors {wrong} are pinned by nobody, or not by who needs them")
        for state in states:
            state.lineage.check()

    # ---- what follows from it

    def _begin(self, request: Request, exact_len: int, known: RequestState | None) -> RequestState:
        """Remember a request; vLLM may begin it again: preempted, behind a failed load, or with another exact prefix."""
        tokens = np.asarray(request.all_token_ids, np.int32)
        state = RequestState(
            request.request_id,
            namespace_of(request, self._facts.fingerprint),
            tokens,
            request.num_prompt_tokens,
            exact_len,
            Lineage(exact_len),
        )
        if known is not None:
            self._unpin(known)
            self._captures.give_up(known)
            state.failure, state.hashes = known.failure, known.hashes
            state.before = known.report(self._policy.name) if known.is_admitted else known.before
            if state.before is not None:
                state.lineage = known.lineage
                state.lineage.restart(exact_len)
        self._states[request.request_id] = state
        return state

    def _decide(self, state: RequestState, request: Request, stored: StoredPrefix) -> None:
        """Claim a graft, or begin to capture the text."""
        claim, matches = self._decisions.claim_of(state, request, stored, self._refusal)
        if isinstance(claim, Miss):
            state.miss = claim
            state.take_stored(stored)
            if state.captures:
                self._captures.open_behind_prefix(state, matches)
            return
        state.hashes = make_private(request, claim.first_approximate // self._facts.hash_block_size)
        state.claim = claim
        for donor in claim.donors:
            self.registry.catalogue.pin(donor.donor_id)
        state.is_pinned = True

    def _compute(self, request_id: str, miss: Miss) -> None:
        """Let vLLM compute a request whose lookup failed half-way, and keep nothing of it."""
        state = self._states.get(request_id)
        if state is not None and state.is_admitted:
            del self._states[request_id]  # it stands for what the request was before
        elif state is not None:
            self._unpin(state)
            self._captures.give_up(state)
            state.claim, state.miss = None, miss

    def _due(self, state: RequestState, stop: int) -> list[Capture]:
        """Commands for what this step computes up to position `stop`; on a failure the text becomes no donor."""
        try:
            return list(self._captures.due(state, stop))
        except Exception:
            self.counts.error()
            logger.exception("text of request %s is not kept for others", state.request_id)
            self._captures.give_up(state)
            return []

    def _complete(self, state: RequestState, outcome: GraftOutcome) -> None:
        """A graft is made, or is not."""
        self._unpin(state)
        state.outcome = outcome
        if outcome.fell_back:
            if not outcome.is_store_miss:
                self.counts.error()
            state.miss = Miss(_reason(outcome), outcome.fell_back)
            if state.claim is not None:
                state.lineage.withdraw(state.claim.plan.exact_len)
        else:
            state.lineage.recompute(outcome.recomputed_runs)
        if outcome.failed:
            state.failure = state.failure or state.miss
        self._captures.graft_ended(state, failed=outcome.failed)

    def _forget_everything(self) -> None:
        for state in (*self._states.values(), *self._ended.values()):
            self._captures.give_up(state)
            state.captures = False
            if not state.is_admitted:
                self._unpin(state)
                state.void = state.void or state.claim
                state.claim, state.is_stale = None, True
        for donor in list(self.registry.catalogue):
            self.registry.forget(donor.donor_id)
        self.registry.stores.reset()
        self._decisions.reset()

    def _follow_stores(self, report: StoreReport) -> None:
        """Take what workers told of stores."""
        for donor_id in report.unpromoted:
            self.registry.promoted(donor_id, is_kept=False)
        for donor_id in report.promoted:
            self.registry.promoted(donor_id, is_kept=True)
        self.registry.stores.receive(report)
        self.counts.stores(report.counts)

    def _unpin(self, state: RequestState) -> None:
        if state.is_pinned and state.claim is not None:
            for donor in state.claim.donors:
                if self.registry.catalogue.get(donor.donor_id) is not None:
                    self.registry.catalogue.unpin(donor.donor_id)
        state.is_pinned = False


def _reason(outcome: GraftOutcome) -> MissReason:
    """Why nothing of a graft that fell back or failed is left."""
    if outcome.is_policy_error:
        return MissReason.POLICY_ERROR
    return MissReason.STORE if outcome.is_store_miss else MissReason.ERROR


def _promised(state: RequestState | None) -> tuple[int, bool]:
    if state is None or state.claim is None:
        return 0, False
    return state.claim.num_tokens, state.claim.asynchronous
