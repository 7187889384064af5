"""The attempts of all requests: what vLLM and workers did becomes events of theirs, and their commands are carried out."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.errors import CorruptCacheError
from kvgraft.integrations.vllm.scheduler.holdings import RegistryHoldings
from kvgraft.integrations.vllm.scheduler.namespaces import namespace_of
from kvgraft.integrations.vllm.scheduler.private_hashes import PrivateBlockHashes, is_tainted
from kvgraft.integrations.vllm.scheduler.refused import is_session
from kvgraft.integrations.vllm.scheduler.requests import ScheduledRows, VLLMRequest
from kvgraft.integrations.vllm.scheduler.scheduled import num_known
from kvgraft.integrations.vllm.scheduler.usage import count_as_computed, first_prefill
from kvgraft.reuse.attempt import AskedPrompt, Attempt, AttemptPhase, commands, drive, events
from kvgraft.reuse.failures import miss_of
from kvgraft.reuse.report import report_as_dict

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sequence

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvgraft.integrations.vllm.messages import Capture, GraftRepair
    from kvgraft.integrations.vllm.scheduler.captures import Captures
    from kvgraft.integrations.vllm.scheduler.continuing import Continuing
    from kvgraft.integrations.vllm.scheduler.counts import Counts
    from kvgraft.integrations.vllm.scheduler.decisions import Decisions
    from kvgraft.integrations.vllm.scheduler.facts import EngineFacts
    from kvgraft.integrations.vllm.scheduler.grafts import Grafts
    from kvgraft.integrations.vllm.scheduler.pending_blocks import PendingBlocks
    from kvgraft.integrations.vllm.scheduler.step_rows import StepRows
    from kvgraft.integrations.vllm.scheduler.stored import StoredPrefix
    from kvgraft.reuse.claim import Claim
    from kvgraft.reuse.outcome import GraftOutcome
    from kvgraft.types import Miss

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ports:
    """What attempts need of the scheduler's half; nothing of it decides what becomes of a request.

    Attributes:
        decisions: Answers lookups.
        captures: Keeps text.
        grafts: Writes commands to workers.
        rows: Counts the rows of steps.
        continuing: Names blocks that requests go on from.
        pending: Knows blocks without K/V.
        counts: Of metrics.
    """

    decisions: Decisions
    captures: Captures
    grafts: Grafts
    rows: StepRows
    continuing: Continuing
    pending: PendingBlocks
    counts: Counts


class Attempts:
    """Follows requests, and carries out what their attempts command. Not thread-safe.

    A command that fails is logged and counted, and the attempt says how to go on. Commands of a step (`repairs_of`,
    `captures_of`) are not guarded: workers get all of a step's or none.

    Attributes:
        running: The present attempt of every request that has not ended.
        ended: Requests that ended in the step of their graft or its repair, until workers report it.
        policy: Name of the selection policy, for reports.
    """

    def __init__(self, ports: Ports, *, facts: EngineFacts, policy: str) -> None:
        self.running: dict[str, VLLMRequest] = {}
        self.ended: dict[str, VLLMRequest] = {}
        self._decisions, self._captures, self._grafts = ports.decisions, ports.captures, ports.grafts
        self._rows, self._continuing, self._pending = ports.rows, ports.continuing, ports.pending
        self._counts, self._registry = ports.counts, ports.captures.registry
        self._facts, self.policy = facts, policy

    def __len__(self) -> int:
        return len(self.running) + len(self.ended)

    # ---- lookups

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
        state = self._new(request, prompt) if known is None else self._again(known, prompt)
        self.running[request.request_id] = state
        decided, matches = self._decisions.decide(
            prompt, request, stored, refusal=refusal, failure=state.attempt.earlier.failure
        )
        state.attempt.decide(decided.graft, decided.lookup_ms)
        state.keeps_text, state.stored = decided.keeps_text, decided.stored
        if isinstance(request.block_hashes, PrivateBlockHashes):
            state.hashes = request.block_hashes
        claim = state.claim
        if claim is not None:
            state.hashes = self._named(request, state, claim)
            state.held.pin([donor.donor_id for donor in claim.donors])
            state.prefill = first_prefill(request)
            return
        if state.stored.num_tokens and state.attempt.earlier.report is None:
            state.attempt.restore(state.prefix_len)
        if state.keeps_text:
            self._captures.open_after_prefix(state, matches)

    def _new(self, request: Request, prompt: AskedPrompt) -> VLLMRequest:
        is_lost = bool(prompt.num_generated) and is_tainted(request)
        return VLLMRequest(Attempt(prompt, prompt.lineage()), RegistryHoldings(self._registry), is_reported=not is_lost)

    def _again(self, known: VLLMRequest, prompt: AskedPrompt) -> VLLMRequest:
        attempt = known.attempt.again(prompt, self.policy, self._facts.hash_block_size)
        self._take(known, events.Replaced())
        held = RegistryHoldings(self._registry)
        return VLLMRequest(attempt, held, hashes=known.hashes, is_reported=known.is_reported)

    def _named(self, request: Request, state: VLLMRequest, claim: Claim) -> PrivateBlockHashes:
        """Keep the blocks of a graft from exact requests; others may go on from them unless that could mislead them."""
        prompt, first = state.prompt, claim.first_approximate // self._facts.hash_block_size
        is_of_model = self._captures.trusts_prefixes or not prompt.cached_len
        generation = max(prompt.generation, claim.generation)
        if claim.decision.substitution is None and generation and is_of_model and not prompt.is_session:
            return self._continuing.share(request, prompt.namespace, first, generation)
        return self._continuing.keep_private(request, first)

    def compute(self, request_id: str, miss: Miss) -> None:
        """Let vLLM compute a request whose lookup failed half-way, and keep nothing of it."""
        state = self.running.get(request_id)
        if state is not None:
            self._take(state, events.Replaced(miss))  # one with blocks stands for what the request was before

    def unrepaired(self) -> Iterator[tuple[str, int]]:
        """Yield the requests whose repair is due, and the positions from which on it may change K/V."""
        for state in self.running.values():
            if state.attempt.owes_repair and state.claim is not None:
                yield state.request_id, state.claim.first_approximate

    # ---- steps

    def admit(self, state: VLLMRequest, block_ids: Sequence[Sequence[int]], num_tokens: int) -> None:
        """Take the blocks of a request, of which vLLM counts `num_tokens` as loaded."""
        try:
            event = self._admission(state, block_ids, num_tokens)
        except Exception as error:  # noqa: BLE001 - logged there
            self._failed(state, events.Admitted(num_tokens), error)
            self.admit_in_vain(state, block_ids, num_tokens, miss_of(error).detail)
            return
        self._take(state, event)

    def _admission(self, state: VLLMRequest, block_ids: Sequence[Sequence[int]], num_tokens: int) -> events.Admitted:
        if not num_tokens or state.attempt.is_admitted:
            return events.Admitted(num_tokens)
        state.block_ids = [list(ids) for ids in block_ids]
        donors = () if state.claim is None else state.claim.decision.donors
        return events.Admitted(num_tokens, tuple(self._registry.stores.tier_of(donor.donor_id) for donor in donors))

    def admit_in_vain(
        self, state: VLLMRequest, block_ids: Sequence[Sequence[int]], num_tokens: int, reason: str
    ) -> None:
        """Let a load fail that vLLM may count on, of a request that could not be admitted as it should."""
        if num_tokens and not state.attempt.is_admitted:
            state.block_ids = [list(ids) for ids in block_ids]
        self._take(state, events.Failed(events.Admitted(num_tokens), reason))

    def preempt(self, state: VLLMRequest | None) -> None:
        """Hide what a request leaves that vLLM takes the blocks of."""
        if state is not None:
            self._take(state, events.Preempted())

    def scheduled(self, output: SchedulerOutput) -> list[ScheduledRows]:
        """Take the blocks of a step, and return what it computes of requests."""
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
        return tuple(
            self._grafts.repair(state, command.claim)
            for state, start, _ in rows
            for command in state.attempt.receive(events.Ran(start))
            if isinstance(command, commands.RepairNow)
        )

    def captures_of(self, rows: Sequence[ScheduledRows]) -> tuple[Capture, ...]:
        """Return the captures of what a step computes, and of what was to be repaired before it."""
        captures: list[Capture] = []
        for state, _, stop in rows:
            known = len(captures)
            try:
                self._captures.due(state, stop, captures)
            except Exception as error:
                self._counts.failed(error)
                logger.exception("text of request %s is not kept for others", state.request_id)
                for capture in captures[known:]:  # all of one request, or none
                    if capture.donor_id is not None:
                        self._registry.forget(capture.donor_id)
                del captures[known:]
                state.held.give_up_texts()
        return tuple(captures)

    # ---- outcomes

    def copied(self, request_id: str, outcome: GraftOutcome) -> None:
        """Take the outcome of a graft; its request may have ended in the same step."""
        state = self.ended.get(request_id) or self.running.get(request_id)
        if state is not None:
            self._take(state, events.Copied(outcome))

    def repaired(self, request_id: str, outcome: GraftOutcome) -> None:
        """Take the outcome of a repair; its request may have ended, or begun again, in the same step."""
        state = self.ended.get(request_id) or self.running.get(request_id)
        if state is not None:
            self._take(state, events.Repaired(outcome))

    def lose_texts(self, text_ids: Container[int]) -> None:
        """Give up texts that workers have lost."""
        for state in (*self.running.values(), *self.ended.values()):
            state.held.give_up_texts(text_ids)

    def forget_donors(self, *, is_lost: bool = False) -> None:
        """Give up all that depends on donors, and all text that may become one; `is_lost` where workers forget all, too."""
        for state in (*self.running.values(), *self.ended.values()):
            for command in state.attempt.receive(events.Reset(is_lost)):
                self._do(state, command)  # not guarded: what cannot be forgotten is not to be read
            if state.hashes is not None:
                state.hashes.renew()
            state.keeps_text = False
            self._drop_if_over(state)

    # ---- the end

    def finish(self, state: VLLMRequest, request: Request) -> dict[str, object]:
        """Forget a request that ended for any reason, and return its report; see `GraftScheduler.finish`."""
        del self.running[state.request_id]
        self.ended[state.request_id] = state
        num_drawn = len(request.all_token_ids) - state.prompt.num_prompt_tokens
        self._take(state, events.Finished(num_drawn), request)
        return state.sent

    def drop(self, request_id: str) -> None:
        """Forget a request that could not be ended."""
        self._grafts.cancels.append(request_id)  # one that workers have nothing of is ignored
        self.running.pop(request_id, None)
        self.ended.pop(request_id, None)

    def _close(self, state: VLLMRequest, request: Request) -> None:
        """Keep the text of a request that has ended, and show it to a semantic provider if its prompt is complete."""
        self._captures.end(state, np.asarray(request.all_token_ids, np.int32))
        token_ids, substitutes = request.all_token_ids[: request.num_computed_tokens], self._decisions.substitutes
        if substitutes is not None and state.keeps_text and len(token_ids) >= state.prompt.num_prompt_tokens:
            heard = np.asarray(token_ids, np.int64)
            substitutes.provider.heard(state.request_id, heard, state.attempt.lineage)

    def _tell(self, state: VLLMRequest, *, is_final: bool) -> None:
        """Write the report that the client gets, over what may have been written before; count it unless it may change.

        A request has none where that fails: its answer is complete by then.
        """
        if not state.is_reported:
            return
        report = state.attempt.report(self.policy)
        written = report_as_dict(report)
        state.sent.clear()
        state.sent.update(written)
        if is_final:
            self._counts.request(report)

    # ---- commands

    def _take(self, state: VLLMRequest, event: events.Event, request: Request | None = None) -> None:
        """Have an attempt take an event, and carry out what follows; `request` is vLLM's, where it has ended."""
        drive(
            state.attempt,
            event,
            lambda command: self._do(state, command, request),
            lambda what, error: self._failed(state, what, error),
        )
        self._drop_if_over(state)

    def _failed(self, state: VLLMRequest, what: events.Event | commands.Command, error: Exception) -> None:
        self._counts.books.doubt(error)  # counted where the attempt says so
        logger.error("request %s: %s failed", state.request_id, type(what).__name__, exc_info=error)

    def _do(self, state: VLLMRequest, command: commands.Command, request: Request | None = None) -> None:  # noqa: C901, PLR0912 - a row per command
        match command:
            case commands.Open(claim):
                self._captures.open_after_graft(state, claim)
            case commands.Copy(claim):
                self._rows.admit(claim)
                self._grafts.copy(state, claim)
            case commands.Credit(claim):
                self._grafts.credit(claim)
            case commands.Void(claim, reason, is_gone):
                self._grafts.void(state, claim, reason, is_gone=is_gone)
            case commands.Cancel():
                self._grafts.cancels.append(state.request_id)
            case commands.Hide(is_settled):
                self._hide(state, is_settled=is_settled)
            case commands.Unpin():
                state.held.unpin()
            case commands.Keep(is_made):
                self._captures.graft_ended(state, failed=not is_made)
            case commands.Close():
                assert request is not None
                self._close(state, request)
            case commands.Discard():
                state.held.give_up_texts()
            case commands.Release():
                state.held.release()
            case commands.Recount(num_promised, num_computed):
                count_as_computed(state.prefill, num_promised, num_computed)
            case commands.Count():
                self._counts.error()
            case commands.Tell(is_final):
                self._tell(state, is_final=is_final)

    def _hide(self, state: VLLMRequest, *, is_settled: bool) -> None:
        """Hide the blocks of a request: of a settled one those without names, of others all, from itself, too."""
        if state.hashes is None:
            return
        if is_settled:
            state.hashes.rename()
            return
        size = self._facts.hash_block_size
        first = max(state.prompt.cached_len // size, state.hashes.first_private)
        self._pending.forget_hashes(state.hashes, first * size)
        state.hashes.hide_from(first)

    def _drop_if_over(self, state: VLLMRequest) -> None:
        if state.attempt.phase is not AttemptPhase.OVER:
            return
        for states in (self.running, self.ended):
            if states.get(state.request_id) is state:
                del states[state.request_id]

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
            state.attempt.lineage.check()
