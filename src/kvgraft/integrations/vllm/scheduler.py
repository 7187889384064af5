"""The half of the connector that runs beside vLLM's scheduler: lookups, claims, commands to workers, reports to users."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.graft.sparse_prefill import selection_context
from kvgraft.integrations.vllm.donor_registry import DonorRegistry
from kvgraft.integrations.vllm.lookup import Lookup, covered_head, covering
from kvgraft.integrations.vllm.messages import Capture, Graft, StepCommands
from kvgraft.integrations.vllm.metrics import GraftStats
from kvgraft.integrations.vllm.namespaces import namespace_of
from kvgraft.integrations.vllm.refusals import refused_request
from kvgraft.integrations.vllm.request_state import Claim, RequestState
from kvgraft.integrations.vllm.taint import taint_block_hashes
from kvgraft.reuse.lineage import computed_runs
from kvgraft.reuse.policy import configured_policy
from kvgraft.reuse.report import report_as_dict
from kvgraft.types import GraftPlan, Match, Miss, MissReason, ReuseMode

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvgraft.config.vllm import VLLMConfig
    from kvgraft.integrations.vllm.engine_facts import EngineFacts
    from kvgraft.integrations.vllm.messages import GraftOutcome, WorkerReport
    from kvgraft.integrations.vllm.request_state import Piece

logger = logging.getLogger(__name__)

PARAMETER = "kvgraft"
"""Key of our part of `kv_transfer_params`, in requests and in responses."""


class GraftScheduler:
    """Sees every request from its first lookup to its end. Not thread-safe.

    Nothing that happens here fails a request: whatever goes wrong is logged, counted and becomes a miss.
    """

    def __init__(self, config: VLLMConfig, facts: EngineFacts) -> None:
        self.stats = GraftStats()
        self.host_bytes = 0
        self.num_errors = 0
        self._config = config
        self._facts = facts
        self._refusal = facts.refusal
        self._policy = configured_policy(
            config.selection, first_k=config.first_k, recompute_ratio=config.recompute_ratio
        )
        self._registry = DonorRegistry(
            facts.capacity_tokens, min_run=config.min_run, max_generation=config.max_generation
        )
        self._lookup = Lookup(self._registry.catalogue, config, self._policy.recompute_ratio, facts.hidden_size)
        self._states: dict[str, RequestState] = {}
        self._ended: dict[str, RequestState] = {}
        self._grafts: list[Graft] = []
        self._cancels: list[str] = []

    @property
    def registry(self) -> DonorRegistry:
        """The donors."""
        return self._registry

    @property
    def refusal(self) -> str:
        """Why nothing is grafted on this engine, or empty."""
        return self._refusal

    @property
    def num_states(self) -> int:
        """Requests that are remembered."""
        return len(self._states) + len(self._ended)

    def match(self, request: Request, exact_len: int) -> tuple[int, bool]:
        """Decide how many tokens behind vLLM's own `exact_len` are made here, and whether the request waits for them."""
        try:
            state = self._lookup_once(request, exact_len)
        except Exception as error:
            self._count_error()
            logger.exception("lookup for request %s failed; it is computed", request.request_id)
            state = self._forget_claim(request, exact_len, Miss(MissReason.ERROR, f"{type(error).__name__}: {error}"))
        if state.claim is None:
            return 0, False
        return state.claim.num_tokens, state.claim.asynchronous

    def admit(self, request: Request, block_ids: Sequence[Sequence[int]], num_tokens: int) -> None:
        """Take the blocks of a request; vLLM calls this a second time with 0 tokens for asynchronous claims."""
        state = self._states.get(request.request_id)
        if state is None:
            return
        if state.is_admitted and not num_tokens:
            return
        state.is_admitted = True
        claim = state.claim
        if claim is None or not num_tokens:
            self._drop_claim(state)
            return
        state.block_ids = [list(ids) for ids in block_ids]
        try:
            self._open_gaps(state, claim)
        except Exception:
            self._count_error()  # the graft itself must go out: vLLM counts its tokens as computed
            logger.exception("text of request %s is not kept for others", state.request_id)
        donors = claim.donors
        self._grafts.append(
            Graft(
                state.request_id,
                state.token_ids[: claim.end],
                claim.plan,
                claim.spans,
                tuple(d.start_position + s.donor_start for s, d in zip(claim.spans, donors, strict=True)),
                claim.end,
                state.blocks_to(claim.end, self._facts.block_sizes),
                tuple((piece.piece_id, piece.start, piece.stop) for piece in state.gaps),
                state.prompt.piece_id if state.prompt is not None else None,
                claim.asynchronous,
            )
        )
        for span in claim.plan.spans:
            self._registry.catalogue.record_hit(span.donor_id, span.length)

    def commands(self, output: SchedulerOutput) -> StepCommands:
        """What workers do in this step."""
        captures: list[Capture] = []
        for new in output.scheduled_new_reqs:
            state = self._states.get(new.req_id)
            if state is not None:
                state.block_ids = [list(ids) for ids in new.block_ids]
                captures += self._captures(state, new.num_computed_tokens + output.num_scheduled_tokens[new.req_id])
        running = output.scheduled_cached_reqs
        for req_id, blocks, computed in zip(
            running.req_ids, running.new_block_ids, running.num_computed_tokens, strict=True
        ):
            state = self._states.get(req_id)
            if state is not None:
                _add_blocks(state, blocks, replace=req_id in running.resumed_req_ids)
                captures += self._captures(state, computed + output.num_scheduled_tokens[req_id])
        grafts, self._grafts = tuple(self._grafts), []
        cancels, self._cancels = tuple(self._cancels), []
        for graft in grafts:
            state = self._states.get(graft.request_id)
            if state is not None and not graft.asynchronous:
                self._unpin(state)
        seals, discards, drops = self._registry.take_news()
        return StepCommands(cancels, seals, grafts, discards, drops, tuple(captures))

    def receive(self, report: WorkerReport) -> None:
        """Take what workers told."""
        self.host_bytes = report.host_bytes
        if report.refusal and not self._refusal:
            self._refusal = report.refusal
            logger.error("workers refuse to graft: %s", report.refusal)
        for donor_id in report.lost_donors:
            self._registry.forget(donor_id)
        if report.lost_pieces:
            self._lose(report.lost_pieces)
        for request_id, outcome in report.outcomes.items():
            state = self._ended.pop(request_id, None) or self._states.get(request_id)
            if state is not None:
                self._complete(state, outcome)

    def finish(self, request: Request) -> dict[str, object] | None:
        """Forget a request that ended, however; returns what the client is told."""
        state = self._states.pop(request.request_id, None)
        if state is None:
            return None
        try:
            self._settle(state, request)
        except Exception:
            self._count_error()
            logger.exception("text of request %s is not kept for others", state.request_id)
        report = state.report(self._policy.name)
        self.stats.count_request(report)
        return {PARAMETER: report_as_dict(report)}

    def check(self) -> None:
        """Verify invariants; for tests. Raises `CorruptCacheError`."""
        self._registry.check()

    def _lookup_once(self, request: Request, exact_len: int) -> RequestState:
        """The state of a request; vLLM asks again in every step until there is room, and gets the same answer."""
        known = self._states.get(request.request_id)
        if known is not None:
            asked_before = (known.exact_len, len(known.token_ids)) == (exact_len, request.num_tokens)
            if asked_before and not known.is_admitted:
                return known
            self._restart(known)
        tokens = np.asarray(request.all_token_ids, np.int32)
        namespace = namespace_of(request, self._facts.fingerprint)
        state = RequestState(request.request_id, namespace, tokens, exact_len)
        state.has_failed = known is not None and known.has_failed
        self._states[request.request_id] = state
        mode, wrong = _mode_of(request, self._config.mode)
        refusal = self._refusal or refused_request(request)
        if mode is ReuseMode.OFF:
            state.miss = Miss(MissReason.REUSE_OFF, wrong)
        elif refusal:
            state.miss = Miss(MissReason.MODEL_REFUSED, refusal)
        else:
            state.captures = True
            self._decide(state, request, mode)
        return state

    def _decide(self, state: RequestState, request: Request, mode: ReuseMode) -> None:
        """Claim a graft, or begin to capture the prompt."""
        found = self._lookup.find(state.namespace, state.token_ids, state.exact_len)
        state.lookup_ms = found.lookup_ms
        self.stats.count_lookup(found.lookup_ms)
        planned: GraftPlan | Miss = found.planned
        if mode is ReuseMode.EXACT:
            planned = Miss(MissReason.REUSE_OFF)
        elif state.has_failed:
            planned = Miss(MissReason.ERROR, "a graft of this request failed")
        claim = self._claim(planned, found.matches) if isinstance(planned, GraftPlan) else planned
        if isinstance(claim, Miss):
            state.miss = claim
            self._open_prompt(state, found.matches)
            return
        self._taint(request, claim)
        state.claim = claim
        for donor in claim.donors:
            self._registry.catalogue.pin(donor.donor_id)
        state.is_pinned = True

    def _claim(self, plan: GraftPlan, matches: Sequence[Match]) -> Claim | Miss:
        """Promise everything up to the end of the last span; the engine computes the rest with its own prefill."""
        spans, end = plan.spans, plan.spans[-1].target_end
        reaches_back = bool(self._facts.window and plan.exact_len)
        if reaches_back:
            front = covering(matches, max(0, plan.exact_len - self._facts.window + 1), plan.exact_len)
            if front is None:
                return Miss(MissReason.NO_MATCH, "no donor has the window in front of the exact prefix's end")
            spans = (*front, *spans)
        donors = tuple(self._registry.catalogue.get(span.donor_id) for span in spans)
        if any(donor is None for donor in donors):
            return Miss(MissReason.NO_DONORS, "a donor left during the lookup")
        asynchronous = {"sync": False, "async": True}.get(
            self._config.load, self._num_rows(plan, end) > self._config.max_recompute_tokens_per_step
        )
        if len(self._facts.block_sizes) > 1:
            # On models with several KV groups only a waiting request can be told to start again, should its graft fail.
            asynchronous = self._facts.reports_failed_loads
            if reaches_back and not asynchronous:
                return Miss(
                    MissReason.MODEL_REFUSED, "this vLLM cannot take loads of models with several KV groups back"
                )
        return Claim(plan, end, spans, tuple(d for d in donors if d is not None), asynchronous)

    def _num_rows(self, plan: GraftPlan, end: int) -> int:
        """Positions that workers compute, as far as it can be told beforehand."""
        if self._policy.observes:
            return end - plan.exact_len
        chosen = next(self._policy.steps(selection_context(plan))).positions
        return int(np.searchsorted(plan.compute, end)) + len(chosen)

    def _taint(self, request: Request, claim: Claim) -> None:
        """Positions in front of the first span are exact, unless windows reach back to K/V of donors."""
        first = claim.plan.exact_len if self._facts.window else claim.plan.spans[0].target_start
        taint_block_hashes(request, first // self._facts.hash_block_size)

    def _open_prompt(self, state: RequestState, matches: Sequence[Match]) -> None:
        """Begin to capture the prompt of a request that is computed, where no donor has its text."""
        num_tokens, exact_len = len(state.token_ids), state.exact_len
        matches = [match for match in matches if self._is_exact(match)]
        covered = sum(match.length for match in matches)
        if num_tokens - covered < self._config.min_run:
            return
        # What vLLM had cached is captured again only if no donor has it; of windows it is not there any more.
        start = exact_len if self._facts.window or covered_head(matches) >= exact_len else 0
        if start == 0:
            self._registry.supersede(matches)
        state.prompt = self._registry.open(start, num_tokens, 0)
        state.output = self._registry.open_output(num_tokens, 0)

    def _is_exact(self, match: Match) -> bool:
        donor = self._registry.catalogue.get(match.donor_id)
        return donor is not None and donor.generation == 0

    def _open_gaps(self, state: RequestState, claim: Claim) -> None:
        """Begin to capture what a grafted request computes; text behind donors of generation g is of generation g + 1."""
        if not state.captures:
            return
        num_tokens = len(state.token_ids)
        reused = [
            (span.target_start, span.target_end, donor.generation)
            for span, donor in zip(claim.spans, claim.donors, strict=True)
        ]
        *gaps, tail = computed_runs(reused, claim.plan.exact_len, num_tokens)
        pieces = [self._registry.open(*gap) for gap in gaps]
        state.gaps = [piece for piece in pieces if piece is not None]
        state.prompt = self._registry.open(*tail)
        state.output = self._registry.open_output(num_tokens, tail.generation)

    def _captures(self, state: RequestState, stop: int) -> list[Capture]:
        """Commands for what this step computes up to position `stop`; on a failure the text becomes no donor."""
        try:
            return list(self._due(state, stop))
        except Exception:
            self._count_error()
            logger.exception("text of request %s is not kept for others", state.request_id)
            self._stop_capturing(state)
            return []

    def _due(self, state: RequestState, stop: int) -> Iterable[Capture]:
        prompt, output = state.prompt, state.output
        if prompt is not None and prompt.next < min(stop, prompt.stop):
            yield self._capture(state, prompt, min(stop, prompt.stop))
        if output is not None and stop - output.next >= self._facts.output_chunk:
            if self._registry.extend(output, stop):
                yield self._capture(state, output, stop)
            else:
                state.output = None
                self._registry.abandon(output)

    def _settle(self, state: RequestState, request: Request) -> None:
        """Let go of what an ended request holds; tell workers where its graft is still under way."""
        waits = state.is_admitted and state.claim is not None and state.outcome is None and not state.has_failed
        if waits and state.claim is not None and state.claim.asynchronous:
            self._cancels.append(state.request_id)  # first of all: vLLM waits for it to free the blocks
        self._unpin(state)
        self._seal_output(state, request)
        if waits and state.claim is not None and not state.claim.asynchronous:
            self._ended[state.request_id] = state  # its outcome comes behind its last token
            return
        for piece in state.gaps:
            self._registry.abandon(piece)

    def _seal_output(self, state: RequestState, request: Request) -> None:
        """Register the answer of a request that ended, or give up what of it is incomplete."""
        is_complete = state.prompt is None or state.prompt.next >= state.prompt.stop
        if state.output is not None and is_complete:
            self._registry.seal(state.namespace, np.asarray(request.all_token_ids, np.int32), state.output)
        else:
            self._registry.abandon(state.output)
        self._registry.abandon(None if is_complete else state.prompt)

    def _stop_capturing(self, state: RequestState) -> None:
        for piece in (state.prompt, state.output):
            self._registry.abandon(piece)
        state.prompt = state.output = None

    def _capture(self, state: RequestState, piece: Piece, stop: int) -> Capture:
        start, piece.next = piece.next, stop
        donor_id = None
        if piece is state.prompt and stop == piece.stop:
            donor_id = self._registry.register(state.namespace, state.token_ids, piece)
        return Capture(piece.piece_id, start, stop, state.blocks_to(stop, self._facts.block_sizes), donor_id)

    def _complete(self, state: RequestState, outcome: GraftOutcome) -> None:
        """A graft is made, or is not."""
        self._unpin(state)
        state.outcome = outcome
        if outcome.fell_back:
            self._count_error()
            state.miss = Miss(MissReason.ERROR, outcome.fell_back)
        self.stats.count_graft(outcome)
        gaps, state.gaps = state.gaps, []
        for piece in gaps:
            piece.next = piece.stop
            if outcome.failed:
                self._registry.abandon(piece)
            else:
                self._registry.seal(state.namespace, state.token_ids, piece)
        if outcome.failed:
            state.has_failed = True

    def _lose(self, piece_ids: frozenset[int]) -> None:
        for state in (*self._states.values(), *self._ended.values()):
            for piece in (state.prompt, state.output, *state.gaps):
                if piece is not None and piece.piece_id in piece_ids:
                    self._registry.abandon(piece)
            state.prompt = None if state.prompt is not None and state.prompt.piece_id in piece_ids else state.prompt
            state.output = None if state.output is not None and state.output.piece_id in piece_ids else state.output
            state.gaps = [piece for piece in state.gaps if piece.piece_id not in piece_ids]

    def _restart(self, state: RequestState) -> None:
        """VLLM begins the request again: after a preemption, a failed load, or with another exact prefix."""
        self._unpin(state)
        for piece in (state.output, *state.gaps):
            self._registry.abandon(piece)
        if state.prompt is not None and state.prompt.next < state.prompt.stop:
            self._registry.abandon(state.prompt)

    def _forget_claim(self, request: Request, exact_len: int, miss: Miss) -> RequestState:
        known = self._states.get(request.request_id)
        if known is not None:
            self._restart(known)
        tokens = np.zeros(request.num_tokens, np.int32)
        state = RequestState(
            request.request_id, namespace_of(request, ""), tokens, exact_len, miss=miss, has_failed=True
        )
        self._states[request.request_id] = state
        return state

    def _drop_claim(self, state: RequestState) -> None:
        """VLLM admitted the request without our tokens."""
        if state.claim is not None:
            self._unpin(state)
            state.claim, state.miss = None, Miss(MissReason.NO_ROOM, "vLLM admitted the request without its graft")

    def _count_error(self) -> None:
        self.num_errors += 1
        self.stats.count_error()

    def _unpin(self, state: RequestState) -> None:
        if state.is_pinned and state.claim is not None:
            state.is_pinned = False
            for donor in state.claim.donors:
                if self._registry.catalogue.get(donor.donor_id) is not None:
                    self._registry.catalogue.unpin(donor.donor_id)


def _add_blocks(state: RequestState, blocks: Sequence[Sequence[int]] | None, *, replace: bool) -> None:
    if replace:
        state.block_ids = [list(ids) for ids in blocks or ()]
    elif blocks is not None:
        for known, more in zip(state.block_ids, blocks, strict=True):
            known.extend(more)


def _mode_of(request: Request, default: str) -> tuple[ReuseMode, str]:
    """What the request asks for, and what is wrong with that; a wrong value reuses nothing."""
    given = (request.kv_transfer_params or {}).get(PARAMETER, default)
    try:
        return ReuseMode(given), ""
    except ValueError:
        return ReuseMode.OFF, f"kv_transfer_params[{PARAMETER!r}] must be off, exact or graft, not {given!r}"
