"""Attempts at requests: from their lookup to the outcome of their graft, or to the end of the request."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvgraft.errors import CorruptCacheError
from kvgraft.integrations.vllm.messages import GraftRepair
from kvgraft.integrations.vllm.scheduler.holdings import RegistryHoldings
from kvgraft.integrations.vllm.scheduler.namespaces import namespace_of
from kvgraft.integrations.vllm.scheduler.private_hashes import PrivateBlockHashes, is_tainted
from kvgraft.integrations.vllm.scheduler.refused import is_session
from kvgraft.integrations.vllm.scheduler.requests import AskedPrompt, AttemptPhase, RepairPhase, VLLMRequest
from kvgraft.integrations.vllm.scheduler.scheduled import num_known
from kvgraft.integrations.vllm.scheduler.usage import count_as_computed, first_prefill
from kvgraft.reuse.lineage import Lineage
from kvgraft.reuse.report import report_as_dict
from kvgraft.types import Miss, MissReason

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sequence

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvgraft.integrations.vllm.messages import Capture, GraftOutcome
    from kvgraft.integrations.vllm.scheduler.captures import Captures
    from kvgraft.integrations.vllm.scheduler.claims import Claim
    from kvgraft.integrations.vllm.scheduler.continuing import Continuing
    from kvgraft.integrations.vllm.scheduler.counts import Counts
    from kvgraft.integrations.vllm.scheduler.decisions import Decisions
    from kvgraft.integrations.vllm.scheduler.facts import EngineFacts
    from kvgraft.integrations.vllm.scheduler.stored import StoredPrefix

logger = logging.getLogger(__name__)


_SECOND = 2
"""Number of the token that a repair after the first one comes with."""


class ScheduledRows(NamedTuple):
    """An attempt, and the positions `[start, stop)` that a step computes of it, without drafts."""

    state: VLLMRequest
    start: int
    stop: int


class Attempts:
    """The attempts of all requests. Not thread-safe.

    Attributes:
        running: The present attempt of every request that has not ended.
        ended: Requests that ended in the step of their graft or its repair, until workers report it.
        policy: Name of the selection policy, for reports.
    """

    def __init__(
        self,
        decisions: Decisions,
        captures: Captures,
        continuing: Continuing,
        counts: Counts,
        *,
        facts: EngineFacts,
        policy: str,
    ) -> None:
        self.running: dict[str, VLLMRequest] = {}
        self.ended: dict[str, VLLMRequest] = {}
        self._decisions, self._captures, self._counts = decisions, captures, counts
        self._continuing = continuing
        self._registry = captures.registry
        self._facts, self.policy = facts, policy

    def __len__(self) -> int:
        return len(self.running) + len(self.ended)

    def begin(self, request: Request, cached_len: int, stored: StoredPrefix, refusal: str) -> None:
        """Begin an attempt: claim a graft, or begin to capture the text.

        vLLM may begin a request again: preempted, after a failed load, or with another exact prefix.
        """
        known = self.running.get(request.request_id)
        prompt = AskedPrompt(
            request.request_id,
            namespace_of(request, self._facts.fingerprint),
            np.asarray(request.all_token_ids, np.int32),
            request.num_prompt_tokens,
            cached_len,
            self._facts.answer_len(request.num_prompt_tokens, request.max_tokens),
            is_session(request),
            self._continuing.exact_len(request, cached_len),
            self._continuing.generation(request, cached_len),
        )
        if known is None:
            is_lost = bool(prompt.num_generated) and is_tainted(request)
            held = RegistryHoldings(self._registry)
            state = VLLMRequest(prompt, Lineage(prompt.exact_len), held, is_reported=not is_lost)
            prompt.go_on(state.lineage)
        else:
            state = known.again(prompt, self.policy, self._facts.hash_block_size)
        self.running[request.request_id] = state
        state.decided, matches = self._decisions.decide(
            prompt, request, stored, refusal=refusal, failure=state.earlier.failure
        )
        claim = state.claim
        if isinstance(request.block_hashes, PrivateBlockHashes):
            state.hashes = request.block_hashes
        if claim is not None:
            state.hashes = self._named(request, state, claim)
            state.held.pin([donor.donor_id for donor in claim.donors])
            state.prefill = first_prefill(request)
            return
        if state.decided.stored.num_tokens and state.earlier.report is None:
            state.lineage = Lineage(state.prefix_len)
        if state.decided.keeps_text:
            self._captures.open_after_prefix(state, matches)

    def _named(self, request: Request, state: VLLMRequest, claim: Claim) -> PrivateBlockHashes:
        """Keep the blocks of a graft from exact requests; others may go on from them unless that could mislead them."""
        prompt, first = state.prompt, claim.first_approximate // self._facts.hash_block_size
        is_of_model = self._captures.trusts_prefixes or not prompt.cached_len
        generation = max(prompt.generation, claim.generation)
        if claim.decision.substitution is None and generation and is_of_model and not prompt.is_session:
            return self._continuing.share(request, prompt.namespace, first, generation)
        return self._continuing.keep_private(request, first)

    def unrepaired(self) -> Iterator[tuple[str, int]]:
        """Yield the requests whose repair is due, and the positions from which on it may change K/V."""
        for state in self.running.values():
            if state.repair_phase is RepairPhase.DUE and state.claim is not None:
                yield state.request_id, state.claim.first_approximate

    def compute(self, request_id: str, miss: Miss) -> None:
        """Let vLLM compute a request whose lookup failed half-way, and keep nothing of it."""
        state = self.running.get(request_id)
        if state is None:
            return
        state.held.release()
        if state.is_admitted:
            del self.running[request_id]  # it stands for what the request was before
        else:
            state.miss(miss)

    def scheduled(self, output: SchedulerOutput) -> list[ScheduledRows]:
        """Take the blocks of a step, and return what it computes of attempts."""
        rows: list[ScheduledRows] = []
        for new in output.scheduled_new_reqs:
            state = self.running.get(new.req_id)
            if state is not None:
                state.add_blocks(new.block_ids, replace=True)
                count = num_known(output, new.req_id)
                rows.append(ScheduledRows(state, new.num_computed_tokens, new.num_computed_tokens + count))
        running = output.scheduled_cached_reqs
        for req_id, blocks, computed in zip(
            running.req_ids, running.new_block_ids, running.num_computed_tokens, strict=True
        ):
            state = self.running.get(req_id)
            if state is not None:
                state.add_blocks(blocks, replace=req_id in running.resumed_req_ids)
                rows.append(ScheduledRows(state, computed, computed + num_known(output, req_id)))
        return rows

    def repairs_of(self, rows: Sequence[ScheduledRows]) -> tuple[GraftRepair, ...]:
        """Return the repairs before a step: of requests with a whole prompt, whose second token it computes."""
        repairs = []
        for state, start, _ in rows:
            claim = state.claim
            if state.repair_phase is RepairPhase.DUE and claim is not None and start >= claim.plan.num_tokens:
                state.repair_phase = RepairPhase.SENT
                blocks = state.blocks_to(claim.plan.num_tokens, self._facts.block_sizes)
                repairs.append(GraftRepair(state.request_id, blocks))
        return tuple(repairs)

    def captures_of(self, rows: Sequence[ScheduledRows]) -> tuple[Capture, ...]:
        """Return the captures of what a step computes, and of what was to be repaired before it."""
        captures: list[Capture] = []
        for state, _, stop in rows:
            known = len(captures)
            with self._keeping(state):
                try:
                    self._captures.due(state, stop, captures)
                except BaseException:
                    for capture in captures[known:]:  # all of one attempt, or none
                        if capture.donor_id is not None:
                            self._registry.forget(capture.donor_id)
                    del captures[known:]
                    raise
        return tuple(captures)

    @contextmanager
    def _keeping(self, state: VLLMRequest) -> Iterator[None]:
        """Give up all texts of a request if the block fails, which keeps some of them."""
        try:
            yield
        except Exception as error:
            self._counts.failed(error)
            logger.exception("text of request %s is not kept for others", state.request_id)
            state.held.give_up_texts()

    def give_up(self, request_id: str, outcome: GraftOutcome) -> None:
        """Take the outcome of a graft or a repair as far as it must be known, where taking all of it has failed.

        What was copied counts as copied, even if it was computed since, and nothing of the request is kept for others.
        """
        state = self.ended.pop(request_id, None) or self.running.get(request_id)
        if state is None:
            return
        if state.waits_for_graft:  # a repair that is due is sent, if for nothing where the graft was not made
            state.outcome, state.phase = outcome, AttemptPhase.RUNNING
        elif state.repair_phase is RepairPhase.SENT:
            state.repair_phase = RepairPhase.NONE
        state.held.release()

    def begin_anew(self) -> None:
        """Keep of attempts what reports and vLLM need; the books that they go by are empty, and workers forget all."""
        self.forget_donors()
        for state in self.running.values():
            state.repair_phase = RepairPhase.NONE
        for request_id, state in [*self.running.items(), *self.ended.items()]:
            try:
                state.lineage.check()
            except CorruptCacheError:
                if not state.is_admitted:
                    state.lineage = Lineage(state.prompt.exact_len)
                    state.prompt.go_on(state.lineage)
                    continue
                self.running.pop(request_id, None)  # it ends without a report
                self.ended.pop(request_id, None)

    def complete(self, request_id: str, outcome: GraftOutcome) -> None:
        """Take the outcome of a graft; its request may have ended in the same step."""
        ended = self.ended.pop(request_id, None)
        state = ended or self.running.get(request_id)
        if state is not None:
            self._complete(state, outcome)
        if ended is not None:
            self._report(ended)

    def repaired(self, request_id: str, outcome: GraftOutcome) -> None:
        """Take the outcome of a repair; its request may have ended, or begun again, in the same step."""
        state = self.ended.get(request_id) or self.running.get(request_id)
        if state is None or state.repair_phase is not RepairPhase.SENT or state.waits_for_graft:
            return
        self._repaired(state, outcome)
        if self.ended.pop(request_id, None) is not None:
            self._report(state)

    def _repaired(self, state: VLLMRequest, outcome: GraftOutcome) -> None:
        """Take over what a repair changed: the first token was drawn before it, so that its graft is still reported."""
        state.repair_phase = RepairPhase.NONE
        assert state.repair is not None
        assert state.outcome is not None
        assert state.claim is not None
        plan = state.claim.plan
        if outcome.failed:
            if not outcome.is_gone:
                self._counts.error()
            state.repair = replace(state.repair, reason=outcome.fell_back)
            return
        if outcome.fell_back:
            self._counts.error()
            is_exact = state.prompt.exact_len == state.prompt.prefix_len
            exact_from = _SECOND if is_exact else None
            healed = plan.num_tokens - plan.spans[0].target_start
            state.repair = replace(
                state.repair, reason=outcome.fell_back, exact_from_token=exact_from, healed_tokens=healed
            )
        state.repair = replace(state.repair, from_token=_SECOND)
        state.outcome = replace(outcome, read_ms=state.outcome.read_ms)
        state.lineage.recompute(outcome.recomputed_runs)

    def _complete(self, state: VLLMRequest, outcome: GraftOutcome) -> None:
        """Take over whether a graft was made."""
        miss = Miss(_reason(outcome), outcome.fell_back)
        is_error = bool(outcome.fell_back) and not (outcome.is_store_miss or outcome.is_gone)
        if is_error:
            self._counts.error()
        if outcome.failed and not outcome.is_gone and state.earlier.failure is None:
            state.earlier = replace(state.earlier, failure=miss)
        claim = state.claim
        if claim is None or not state.waits_for_graft:
            return  # vLLM has begun the request again: what it was promised since stays
        state.held.unpin()
        state.outcome, state.phase = outcome, AttemptPhase.RUNNING
        if outcome.fell_back:
            state.lineage.withdraw(claim.plan.prefix_len)
            state.miss(miss)
            count_as_computed(state.prefill, claim.num_tokens)
            state.repair, state.repair_phase = None, RepairPhase.NONE
        else:
            state.lineage.recompute(outcome.recomputed_runs)
        with self._keeping(state):
            self._captures.graft_ended(state, failed=outcome.failed)

    def lose_texts(self, text_ids: Container[int]) -> None:
        """Give up texts that workers have lost."""
        for state in (*self.running.values(), *self.ended.values()):
            state.held.give_up_texts(text_ids)

    def forget_donors(self) -> None:
        """Give up all that depends on donors, and all text that may become one."""
        for state in (*self.running.values(), *self.ended.values()):
            state.held.give_up_texts()
            if state.hashes is not None:
                state.hashes.renew()
            state.decided = replace(state.decided, keeps_text=False)
            state.leave_unrepaired("donors were forgotten before the second token")
            if not state.is_admitted:
                state.held.unpin()
                state.phase = AttemptPhase.STALE

    def finish(self, state: VLLMRequest, request: Request) -> dict[str, object]:
        """Forget a request that ended for any reason, and return its report; see `GraftScheduler.finish`."""
        del self.running[state.request_id]
        claim = state.claim if state.waits_for_graft else None
        with self._keeping(state):
            state.held.unpin()
            self._captures.end(state, np.asarray(request.all_token_ids, np.int32))
            self._show_provider(state, request.all_token_ids[: request.num_computed_tokens])
        num_drawn = len(request.all_token_ids) - state.prompt.num_prompt_tokens
        # Of an answer that ended with its first token, no later one was drawn from what a repair under way changes.
        awaits_repair = state.repair_phase is RepairPhase.SENT and num_drawn > 1
        if awaits_repair or (claim is not None and not claim.asynchronous):
            self.ended[state.request_id] = state
            self._report(state, is_counted=False)
        else:
            state.held.give_up_texts()
            if claim is not None:
                state.lineage.withdraw(claim.plan.prefix_len)
                state.miss(Miss(MissReason.DEADLINE, "the request ended before its graft"))
            self._report(state)
        return state.sent

    def _show_provider(self, state: VLLMRequest, token_ids: list[int]) -> None:
        """Show a semantic provider the text of a request whose prompt is complete: donors are left of all of it then."""
        if (
            self._decisions.stand_ins is not None
            and state.decided.keeps_text
            and len(token_ids) >= state.prompt.num_prompt_tokens
        ):
            self._decisions.stand_ins.substitutes.heard(
                state.request_id, np.asarray(token_ids, np.int64), state.lineage
            )

    def _report(self, state: VLLMRequest, *, is_counted: bool = True) -> None:
        """Write the report that the client gets, over what may have been written before; count it unless it may change.

        A request has none where that fails: its answer is complete by then.
        """
        if not state.is_reported:
            return
        try:
            report = state.report(self.policy)
            written = report_as_dict(report)
            state.sent.clear()
            state.sent.update(written)
            if is_counted:
                self._counts.request(report)
        except Exception as error:
            self._counts.failed(error)
            logger.exception("the report of request %s is not complete", state.request_id)

    def check(self) -> None:
        """Verify pins, texts and lineages; see `GraftScheduler.check`."""
        states = [*self.running.values(), *self.ended.values()]
        self._registry.check({text.text_id for state in states for text in state.held.texts})
        pinned = {donor_id for state in states for donor_id in state.held.pinned}
        catalogue = self._registry.catalogue
        wrong = [
            donor.donor_id for donor in catalogue if catalogue.is_pinned(donor.donor_id) != (donor.donor_id in pinned)
        ]
        if wrong:
            raise CorruptCacheError(
                f"donors {wrong} are pinned without a request, or not pinned for the one that needs them"
            )
        for state in states:
            state.lineage.check()


def _reason(outcome: GraftOutcome) -> MissReason:
    """Return why nothing of a graft that fell back or failed is left."""
    if outcome.is_policy_error:
        return MissReason.POLICY_ERROR
    if outcome.is_gone:
        return MissReason.NO_DONORS
    return MissReason.STORE if outcome.is_store_miss else MissReason.ERROR
