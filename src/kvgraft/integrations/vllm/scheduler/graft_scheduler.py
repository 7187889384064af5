"""The half of the connector in vLLM's scheduler: the calls of vLLM, from a request's lookup to its end."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from kvgraft.integrations.vllm.messages import StepCommands
from kvgraft.integrations.vllm.scheduler.attempts import Attempts, Ports
from kvgraft.integrations.vllm.scheduler.captures import Captures
from kvgraft.integrations.vllm.scheduler.coming_texts import ComingTexts
from kvgraft.integrations.vllm.scheduler.continuing import Continuing
from kvgraft.integrations.vllm.scheduler.counts import Counts
from kvgraft.integrations.vllm.scheduler.decisions import Decisions, lookup_of
from kvgraft.integrations.vllm.scheduler.donor_registry import DonorRegistry
from kvgraft.integrations.vllm.scheduler.grafts import Grafts
from kvgraft.integrations.vllm.scheduler.namespaces import namespace_of
from kvgraft.integrations.vllm.scheduler.pending_blocks import HitState, PendingBlocks
from kvgraft.integrations.vllm.scheduler.private_hashes import is_tainted
from kvgraft.integrations.vllm.scheduler.step_rows import StepRows
from kvgraft.integrations.vllm.scheduler.stored import NOTHING_STORED
from kvgraft.integrations.vllm.selection import chosen_policy, fallback_policy
from kvgraft.memory.configured import configured_stores
from kvgraft.reuse.asked import PARAMETER
from kvgraft.reuse.failures import miss_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvgraft.config.vllm import VLLMConfig
    from kvgraft.integrations.vllm.messages import Capture, GraftRepair, StoreReport, WorkerReport
    from kvgraft.integrations.vllm.scheduler.facts import EngineFacts
    from kvgraft.integrations.vllm.scheduler.requests import VLLMRequest
    from kvgraft.integrations.vllm.scheduler.stored import StoredPrefix

logger = logging.getLogger(__name__)


class GraftScheduler:
    """Sees every request from its first lookup to its end. Not thread-safe.

    Nothing that happens here fails a request: an exception is logged, counted and becomes a miss. What it may have left half
    changed is verified before it is read again; where that does not hold, all donors are forgotten, by workers too.
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
            stores=() if facts.refusal else configured_stores(config.store),
            num_ranks=facts.num_ranks,
        )
        self._config = config
        self._facts = facts
        self._refusal = facts.refusal
        policy = chosen_policy(config)
        self._lookup = lookup_of(config, self.registry)
        self._decisions = Decisions(
            config, facts, policy, registry=self.registry, counts=self.counts, lookup=self._lookup
        )
        self._captures = Captures(self.registry, facts)
        self._pending = PendingBlocks(facts.block_sizes, facts.hash_block_size, steps_under_way=facts.steps_under_way)
        self._grafts = Grafts(
            self.registry, self._pending, block_sizes=facts.block_sizes, deadline_s=self._decisions.deadline_s
        )
        self._rows = StepRows(config.rows_together(facts.max_num_batched_tokens))
        self._continuing = Continuing(facts)
        self._coming = ComingTexts(
            self.registry.catalogue.capacity_tokens, min_run=config.min_run, min_saved_tokens=config.min_saved_tokens
        )
        ports = Ports(
            self._decisions, self._captures, self._grafts, self._rows, self._continuing, self._pending, self.counts
        )
        self._attempts = Attempts(ports, facts=facts, policy=policy.name)
        self._is_reset = False
        self._known_changes = 0

    @property
    def refusal(self) -> str:
        """Why nothing is grafted on this engine, or empty."""
        if self._refusal or self._pending.is_bound:
            return self._refusal
        return "vLLM has not shown its KV cache manager, which knows blocks without K/V"

    @property
    def trusts_prefixes(self) -> bool:
        """Whether what vLLM's prefix cache holds was computed by the model as it is now."""
        return self._captures.trusts_prefixes

    @property
    def num_states(self) -> int:
        """Requests that have not ended, or wait for the outcome of their graft."""
        return len(self._attempts)

    # ---- calls of vLLM

    def bind(self, manager: KVCacheManager) -> None:
        """Take vLLM's books of its blocks; nothing is grafted before."""
        self._pending.bind(manager)

    def match(
        self, request: Request, cached_len: int, stored: StoredPrefix = NOTHING_STORED
    ) -> tuple[int | None, bool]:
        """Decide how many tokens after vLLM's own `cached_len` are made here, and whether the request waits for them.

        None are unless a graft reuses `min_saved_tokens` more than a store beside us has exact ones. The number is None
        while the request has to wait for K/V that another one computes, or for a step that has room for its rows, and where
        vLLM is to look by other hashes: it asks again in its next step.
        """
        known = self._attempts.running.get(request.request_id)
        try:
            self._require_sound()
            return self._match(request, known, cached_len, stored)
        except Exception as error:
            self.counts.failed(error)
            logger.exception("lookup for request %s failed; it is computed", request.request_id)
            self._attempts.compute(request.request_id, miss_of(error))
            if is_tainted(request) and self._continuing.exact_len(request, cached_len) < cached_len:
                self._continuing.hide(request)  # it may not be there for it any more
                return None, False
            return 0, False

    def _match(
        self, request: Request, known: VLLMRequest | None, cached_len: int, stored: StoredPrefix
    ) -> tuple[int | None, bool]:
        is_known = known is not None and known.answers(cached_len, request.num_tokens, stored)
        is_known = is_known and not self._coming.has_come(request.request_id)
        if known is not None and known.attempt.is_admitted:  # vLLM looks before `commands` hears of the preemption
            self._attempts.preempt(known)
        if not self._continuing.is_found_rightly(request, cached_len):
            return None, False
        if not is_known and self._finds_more(request, cached_len, stored.num_tokens):
            return None, False
        # Before the claim, which changes the hashes that vLLM has looked up.
        unrepaired = self._attempts.unrepaired()
        hit = self._pending.hit_of(request, unrepaired) if cached_len else HitState.COMPUTED
        if not is_known:
            self._attempts.begin(request, cached_len, stored, self.refusal)
        state = self._attempts.running[request.request_id]
        waits = hit is HitState.OWED or (hit is HitState.SCHEDULED and state.claim is not None)
        waits = waits or (self._may_wait(request, state) and self._coming.keep_waiting(state))
        state.is_promised = not waits and self._rows.have_room_for(state, self._attempts.running.values())
        return _promised(state) if state.is_promised else (None, False)

    def _may_wait(self, request: Request, state: VLLMRequest) -> bool:
        """Return whether a request may wait for text that others are computing; not one that begins again."""
        return not self.refusal and state.attempt.earlier.report is None and self._decisions.may_go_on(request)

    def _finds_more(self, request: Request, cached_len: int, stored_len: int) -> bool:
        """Return whether a request was given hashes by which vLLM finds more than it and a store beside us have exactly.

        One that begins again and has drawn tokens from nothing approximate is not: its report says so, and names no more
        than the prompt.
        """
        is_drawn = request.num_tokens > request.num_prompt_tokens
        if is_drawn or is_tainted(request) or self.refusal or not self._decisions.may_go_on(request):
            return False
        namespace = namespace_of(request, self._facts.fingerprint)
        return self._continuing.extend(
            request, namespace, cached_len, lambda: self._pending.hit_len(request), stored_len=stored_len
        )

    def admit(self, request: Request, block_ids: Sequence[Sequence[int]], num_tokens: int) -> None:
        """Take the blocks of a request; vLLM calls this a second time with 0 tokens for asynchronous claims.

        It may come steps after `match`, or never. What was found may be gone then: vLLM waits for a load all the same, which
        fails at once.
        """
        state = self._attempts.running.get(request.request_id)
        try:
            self._note_blocks(request, state)
        except Exception as error:  # noqa: BLE001 - logged there
            self._once_more(error, partial(self._note_blocks, request, state))
        if state is None:
            return
        try:
            self._require_sound()
        except Exception as error:
            self.counts.books.doubt(error)  # counted by the attempt
            logger.exception("request %s was not admitted as it should be", request.request_id)
            self._attempts.admit_in_vain(state, block_ids, num_tokens, miss_of(error).detail)
            return
        if self._attempts.running.get(request.request_id) is state:  # not where the books had to begin anew
            self._attempts.admit(state, block_ids, num_tokens)
            self._coming.add(state)

    def _note_blocks(self, request: Request, state: VLLMRequest | None) -> None:
        """Note which of a request's blocks this step is to fill."""
        found = 0 if state is None else state.prompt.cached_len
        # Of a request that is admitted a second time a load is through: vLLM counts its tokens as computed.
        loads = state is not None and not state.attempt.is_admitted and bool(state.stored.num_tokens)
        self._pending.admit(request, request.num_computed_tokens or found, loads=loads)

    def sources(self, request_id: str, num_tokens: int) -> dict[str, int]:
        """Return where the tokens promised for a request come from, under vLLM's names."""
        try:
            return self._sources(request_id, num_tokens)
        except Exception as error:
            self.counts.failed(error)
            logger.exception("it is not known where tokens of request %s come from", request_id)
            return {"external_unspecified": num_tokens}

    def _sources(self, request_id: str, num_tokens: int) -> dict[str, int]:
        state = self._attempts.running.get(request_id)
        claim = None if state is None else state.claim
        if claim is None or claim.num_tokens != num_tokens:
            return {"external_unspecified": num_tokens}
        spans = sum(span.length for span in claim.plan.spans)
        far = "disk" if self.registry.stores.are_files else "external_unspecified"
        sources = {"host": spans - claim.num_stored_tokens, "external_unspecified": num_tokens - spans}
        return {**sources, far: sources.get(far, 0) + claim.num_stored_tokens}

    def commands(self, output: SchedulerOutput) -> StepCommands:
        """Return what workers do in this step.

        Where that fails they forget everything, as is done here: they would have something else than what is known of it.
        """
        try:
            self._pending.step_scheduled(output)
        except Exception as error:  # noqa: BLE001 - logged there
            self._once_more(error, partial(self._pending.step_scheduled, output))
        try:
            self._require_sound()
            return self._commands(output)
        except Exception as error:
            self.counts.failed(error)
            logger.exception("the commands of a step failed; workers forget all donors")
            self.counts.books.condemn()
            self._require_sound()
            return self._sent(output, (), ())

    def _commands(self, output: SchedulerOutput) -> StepCommands:
        with self._following_stores():
            self.registry.follow_stores()
        for req_id in output.preempted_req_ids or ():
            self._attempts.preempt(self._attempts.running.get(req_id))
        rows = self._attempts.scheduled(output)
        self._rows.step_scheduled(rows)
        repairs = self._attempts.repairs_of(rows)
        captures = self._attempts.captures_of(rows)
        self._coming.step_scheduled(rows)
        for graft in self._grafts.unsent:
            state = self._attempts.running.get(graft.request_id)
            if state is not None and not graft.asynchronous:
                state.held.unpin()
        num_tokens = sum(output.num_scheduled_tokens.values())
        is_prefill_alone = not any(state.attempt.is_copying for state in self._attempts.running.values())
        with self._following_stores():
            self.registry.stores.speed.step_begins(num_tokens, is_prefill_alone=is_prefill_alone)
        return self._sent(output, repairs, captures)

    def _sent(
        self, output: SchedulerOutput, repairs: tuple[GraftRepair, ...], captures: tuple[Capture, ...]
    ) -> StepCommands:
        """Return commands with all that workers have not been sent; it counts as sent once they are complete."""
        seals, discards, drops = self.registry.news
        commands = StepCommands(
            self._is_reset,
            tuple(self._grafts.cancels),
            seals,
            tuple(self._grafts.unsent),
            discards,
            drops,
            repairs,
            captures,
            self.registry.writes,
            is_idle=not any(output.num_scheduled_tokens.values()),
            known_changes=self._known_changes,
            is_report_due=self._rows.holds_any,
        )
        self.registry.news_were_sent()
        self._is_reset = False
        self._grafts.cancels.clear()
        self._grafts.unsent.clear()
        return commands

    def step_ended(self) -> None:
        """Note that the result of a step has come back."""
        with self._following_stores():
            self.registry.stores.speed.step_ends()

    def receive(self, report: WorkerReport) -> None:
        """Take the workers' report of a step.

        What workers have lost must be lost here as well: where that fails, both forget everything.
        """
        try:
            self._require_sound()
            self._receive(report)
        except Exception as error:
            self.counts.failed(error)
            logger.exception("the workers' report of a step could not be taken; all donors are forgotten")
            self.counts.books.condemn()
        for request_id, outcome in report.outcomes.items():
            try:
                self._pending.settle(request_id, failed=outcome.failed)
            except Exception as error:  # noqa: BLE001 - logged there
                self._once_more(error, partial(self._pending.settle, request_id, failed=outcome.failed))
            self._attempts.copied(request_id, outcome)
        for request_id, outcome in report.repairs.items():
            self._attempts.repaired(request_id, outcome)
        try:
            self._follow_stores(report.store)
        except Exception as error:
            self.counts.failed(error)
            logger.exception("what workers have read of stores is not known; all donors are forgotten")
            self.counts.books.condemn()

    def _receive(self, report: WorkerReport) -> None:
        """Take what is not about single requests."""
        self.host_bytes = report.host_bytes
        if report.refusal and not self._refusal:
            self._refusal = report.refusal
            logger.error("workers refuse to graft: %s", report.refusal)
        if report.fallback and report.fallback != self._attempts.policy:
            # Nothing was grafted before the self-check has passed, of which this comes.
            policy = fallback_policy(self._config)
            self._attempts.policy = policy.name
            self._decisions.choose_by(policy)
        if report.is_proved and not self._refusal:
            logger.info(
                "kvgraft is ready: mode %s, selection %s, up to %d donor tokens",
                self._config.mode,
                self._attempts.policy,
                self._facts.capacity_tokens,
            )
        if report.num_weight_changes > self._known_changes:
            self._captures.trusts_prefixes = False
            self._forget_everything()
            self._known_changes = report.num_weight_changes
            logger.warning(
                "weights were changed in place: donors are forgotten; vLLM's own prefix cache is not, until "
                "reset_prefix_cache(reset_connector=True) is called"
            )
        for _ in range(report.num_failed_copies):
            self.counts.error()
        for donor_id in report.lost_donors:
            self.registry.forget(donor_id)
        if report.lost_texts:
            self._attempts.lose_texts(report.lost_texts)

    def loaded(self, request_ids: set[str]) -> set[str]:
        """Return which requests may go on now whose loads have ended; the others by later calls, one per step."""
        try:
            return self._rows.loaded(request_ids, self._attempts.running)
        except Exception:
            self.counts.error()
            logger.exception("rows of steps are not known; requests go on")
            return request_ids | self._rows.release()

    def finish(self, request: Request) -> dict[str, object] | None:
        """Forget a request that ended for any reason; returns what the client gets.

        vLLM asks before it hands over the workers' report of the step. A request that ends in the step of its graft is
        counted after that report, and the client's is corrected in place: vLLM sends it at the end of the step.
        """
        try:
            self._pending.end(request.request_id)
        except Exception as error:  # noqa: BLE001 - logged there
            self._once_more(error, partial(self._pending.end, request.request_id))
        try:
            self._require_sound()
            return self._finish(request)
        except Exception as error:
            self.counts.failed(error)
            logger.exception("request %s was not ended as it should be", request.request_id)
            self._attempts.drop(request.request_id)
            return None

    def _finish(self, request: Request) -> dict[str, object] | None:
        self._coming.end(request.request_id)
        state = self._attempts.running.get(request.request_id)
        if state is None:
            return None
        report = self._attempts.finish(state, request)
        return {PARAMETER: report} if report else None

    def reset(self, *, prefixes_are_gone: bool) -> None:
        """Forget everything that was ever computed: the model may be another one from now on.

        Requests that run go on and give nothing to others; those that wait are looked up anew. Workers forget too, before
        any later command, and give up grafts that are under way.

        Args:
            prefixes_are_gone: vLLM reset its own prefix cache too; where that has what the old model computed, nothing
                after its hits is captured.
        """
        logger.info("all donors are forgotten: the caches were reset")
        self._is_reset = True
        self._captures.trusts_prefixes = prefixes_are_gone
        try:
            self._forget_everything()
        except Exception as error:
            self.counts.failed(error)
            logger.exception("what is known of donors cannot be forgotten one by one; it begins anew")
            self.counts.books.condemn()  # before anything is read

    def close(self) -> None:
        """Let stores and a semantic provider give back their resources."""
        self.registry.stores.close()
        if self._decisions.substitutes is not None:
            self._decisions.substitutes.provider.close()

    def check(self) -> None:
        """Verify what must hold between two calls of vLLM; for tests.

        Raises:
            CorruptCacheError: It does not.
        """
        self._attempts.check()

    def _forget_everything(self, *, is_lost: bool = False) -> None:
        self._continuing.forget()
        self._coming.clear()
        self.registry.forget_all()
        self._attempts.forget_donors(is_lost=is_lost)

    def _require_sound(self) -> None:
        """Verify the books if an error may have interrupted a change of them, and begin anew where they do not hold.

        Raises:
            Exception: They cannot begin anew yet; the next call tries again.
        """
        if self.counts.books.is_doubtful:
            self._continuing.forget()  # names may be of K/V that have become others, which cannot be verified
            self.counts.books.settle(self.check, self._begin_anew)

    def _begin_anew(self) -> None:
        """Empty all books, and have workers do so with the next step; grafts that vLLM counts on fail there, or fall back."""
        self._is_reset = True
        self._rows.begin_anew()
        self._forget_everything(is_lost=True)

    def _once_more(self, error: Exception, note: Callable[[], None]) -> None:
        """Note once more, after a failure, which blocks hold no K/V yet: nothing may be answered without."""
        self.counts.failed(error)
        logger.error("blocks without K/V are noted once more", exc_info=error)
        note()

    def _follow_stores(self, report: StoreReport) -> None:
        """Take the workers' report of stores."""
        for donor_id in report.unpromoted:
            self.registry.promoted(donor_id, is_kept=False)
        for donor_id in report.promoted:
            self.registry.promoted(donor_id, is_kept=True)
        with self._following_stores():
            self.registry.stores.receive(report)
        self.counts.stores(report.counts)

    @contextmanager
    def _following_stores(self) -> Iterator[None]:
        """Go without what stores report if the block fails; a donor that is gone is found out when it is read."""
        try:
            yield
        except Exception as error:
            self.counts.failed(error)
            logger.exception("stores cannot be followed; what they report is not used")


def _promised(state: VLLMRequest | None) -> tuple[int, bool]:
    if state is None or state.claim is None:
        return 0, False
    return state.claim.num_tokens, state.claim.asynchronous
