"""A request on its way: names the rows it needs next and takes their output. Runs nothing."""

from __future__ import annotations

import time
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.engine.idle.audit import AnswerEvidence, Audit
from kvgraft.engine.requests.request import FinishReason, PromptFacts, Request, RequestOutput, StreamPart
from kvgraft.engine.schedule.answer_report import AnswerReport
from kvgraft.engine.schedule.drafts import DraftLog, Drafts
from kvgraft.engine.schedule.prompt_logprobs import ScoredPrefill, scored
from kvgraft.graft.first_token import reason_if_unsure
from kvgraft.graft.model import SequenceOutput, SequenceRows
from kvgraft.graft.repair import Repair
from kvgraft.reuse.continuation import may_go_on
from kvgraft.types import ReuseMode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray
    from torch import Tensor

    from kvgraft.engine.kv.request_kv import RequestKV
    from kvgraft.engine.model.flops import ModelFlops
    from kvgraft.engine.requests.text import OutputText
    from kvgraft.engine.sampling.sampling import Sampler, TokenLogprobs
    from kvgraft.errors import PolicyError
    from kvgraft.fidelity.control import Loss
    from kvgraft.graft.repair import RepairOutcome
    from kvgraft.graft.sparse_prefill import PrefillOutcome, SparsePrefill
    from kvgraft.reuse.decision import Sampled
    from kvgraft.types import GraftReport, TokenArray


_NO_ROWS = np.empty(0, np.int64)


class Phase(StrEnum):
    """How far a request is."""

    WAITING = "waiting"
    """For slots; it holds nothing."""
    LOADING = "loading"
    """For K/V from a store."""
    PREFILL = "prefill"
    """There are positions to compute before the next token can be drawn from one row."""
    REPAIR = "repair"
    """Its first token is out; the policy's choice is computed before the next one."""
    VERIFYING = "verifying"
    """Its prompt is computed again, exactly, while tokens are drafted after it."""
    DECODE = "decode"


class ActiveRequest:
    """From waiting through prefill and decode to its end; it may be suspended and started again on the way.

    Attributes:
        request: As it was asked.
        phase: How far it is.
        kv: Its K/V; None while it waits.
        finish_reason: Set when nothing more is to be generated.
        begun_at: `time.perf_counter()` when the lookup of its first attempt began; None if there was none.
        moments: `RequestKV.moments` of the attempt that the report is of, of the last one while no token is out.
        stored_len: Positions that it had given the prefix cache when it was suspended last: a use that is counted once.
    """

    def __init__(
        self,
        request: Request,
        text: OutputText,
        sampler: Sampler,
        *,
        flops: ModelFlops,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        loss: Loss | None = None,
    ) -> None:
        self.request = request
        self.phase = Phase.WAITING
        self.kv: RequestKV | None = None
        self.output_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.num_preemptions = 0
        self.stored_len = 0
        self.admitted_at: float | None = None
        self.begun_at: float | None = None
        self.moments: Mapping[str, float] = {}
        self.first_token_at: float | None = None
        self._text = text
        self._sampler = sampler
        self._flops = flops
        self._report = AnswerReport(flops)
        self._owes_repair = False
        sampling = request.sampling
        self._end_ids = frozenset(sampling.stop_token_ids).union(() if sampling.ignore_eos else eos_token_ids)
        self._max_model_len = max_model_len
        self._pass: SparsePrefill | Repair | Drafts | None = None
        self._exact_rows = _NO_ROWS
        self._draft_text = text
        self._draft_log = DraftLog(request.arrival)
        self._loss = loss
        self._sampled: Sampled | None = None
        self._evidence: AnswerEvidence | None = None
        self._was_approximate = False
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self._is_prompt_reported = False

    @property
    def report(self) -> GraftReport | None:
        """Of reuse; None until the prompt is computed for the first time."""
        return self._report.value

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.request.token_ids) + len(self.output_ids)

    @property
    def max_tokens(self) -> int:
        """Slots that it can come to need: the last token drawn needs none."""
        return min(len(self.request.token_ids) + self.request.sampling.max_new_tokens, self._max_model_len) - 1

    @property
    def is_prefilling(self) -> bool:
        """Whether prompt positions are left to compute."""
        return self.phase in (Phase.PREFILL, Phase.REPAIR, Phase.VERIFYING)

    @property
    def is_streaming(self) -> bool:
        """Whether the next pass, or a later one of its repair, has a row of its last token."""
        return self.phase in (Phase.REPAIR, Phase.DECODE)

    @property
    def is_settled(self) -> bool:
        """Whether its prompt's K/V are final: they may be given to others."""
        assert self.kv is not None
        return self.phase is Phase.DECODE and not self.kv.is_healing

    @property
    def due_since(self) -> float:
        """`time.perf_counter()` since when the present rows are waited for: a repair's since the first token."""
        if self.phase is Phase.REPAIR and self.first_token_at is not None:
            return self.first_token_at
        return self.request.arrival

    @property
    def is_scored(self) -> bool:
        """Whether the present prefill pass keeps logits of all its rows."""
        return isinstance(self._pass, ScoredPrefill)

    @property
    def drafts(self) -> Drafts | None:
        """Drafted tokens and the exact frontier; None unless it is verifying."""
        return self._pass if isinstance(self._pass, Drafts) else None

    @property
    def remaining(self) -> NDArray[np.int64]:
        """Positions that the present prefill pass still computes."""
        assert self._pass is not None
        return self._pass.remaining

    def piece(self, limit: int) -> int:
        """Return the prefill rows of `next_rows(limit)`; a row that drafts comes on top of them."""
        assert self._pass is not None
        return self._pass.piece(limit)

    @property
    def known_token_ids(self) -> TokenArray:
        """Tokens that have K/V once the prompt is computed: all but the last one drawn."""
        return np.concatenate([self.request.token_ids, np.asarray(self.output_ids[:-1], np.int64)])

    @property
    def all_token_ids(self) -> TokenArray:
        """Prompt and output so far."""
        return np.concatenate([self.request.token_ids, np.asarray(self.output_ids, np.int64)])

    def sequence(self) -> Request:
        """Return the tokens that need K/V before the next one: the prompt, after a preemption the output too.

        Once tokens are out, the sequence is computed again without a graft: what was reported stays true then. But a prompt
        that was not repaired yet is grafted once more: when it is preempted must not decide what its tokens are drawn from.
        """
        if not self.output_ids or self.is_unrepaired:
            return self.request if self.request.sampling.prompt_logprobs is None else scored(self.request)
        token_ids = self.all_token_ids
        reuse = ReuseMode.OFF if self.request.reuse is ReuseMode.OFF else ReuseMode.EXACT
        return replace(self.request, token_ids=token_ids, reuse=reuse)

    @property
    def goes_on(self) -> bool | None:
        """Whether `sequence` takes what approximate K/V there are of it; None if its reuse mode says so.

        Of a request that begins again these are its own, or those of another turn of its conversation. One that was drawn
        from nothing approximate, and is reported so, takes none.
        """
        is_repaired = bool(self.output_ids) and not self.is_unrepaired
        is_willing = may_go_on(self.request.reuse) and not self.request.repair.rows_per_step
        return is_willing and self._was_approximate if is_repaired else None

    @property
    def is_unrepaired(self) -> bool:
        """Whether the first token is out, and the repair that comes with the second one is not done."""
        return len(self.output_ids) == 1 and self._owes_repair

    def load(self, kv: RequestKV) -> None:
        """Wait for the part of `kv` that is read from a store; `start` follows."""
        self.kv, self.phase = kv, Phase.LOADING
        self._note_admission(kv)

    def start(self, kv: RequestKV, prefill: SparsePrefill) -> None:
        """Begin to compute `sequence()` with the rows of `prefill`; its reused K/V lie in the slots of `kv`."""
        num_logprobs = kv.request.sampling.prompt_logprobs
        if num_logprobs is not None and not self.output_ids:
            prefill = ScoredPrefill(kv, num_logprobs)
        self.kv, self._pass, self.phase = kv, prefill, Phase.PREFILL
        self._note_admission(kv)

    def _note_admission(self, kv: RequestKV) -> None:
        if self.admitted_at is None:
            self.admitted_at, self.begun_at = time.perf_counter(), kv.moments.get("lookup")
        if not self.output_ids:
            self.moments = kv.moments

    def suspend(self) -> TokenArray:
        """Go back to waiting; returns the tokens that have their final K/V, none if its prefill was not done."""
        known = self.request.token_ids[:0]
        if self.phase is Phase.DECODE and self.kv is not None:
            known, self._was_approximate = self.known_token_ids, self.kv.lineage.is_approximate
        if self.drafts is not None:
            known = self.drafts.exact_token_ids
            self._end_drafts()
        if not self.output_ids:
            self._report.forget()
        self.wait()
        self.num_preemptions += 1
        return known

    def wait(self) -> None:
        """Hold no K/V any more; they are the caller's to release."""
        self.kv, self._pass, self.phase = None, None, Phase.WAITING

    def next_rows(self, limit: int = 1) -> SequenceRows:
        """Return rows for the next forward pass, at most `limit` but for rows that go together (`SparsePrefill.piece`)."""
        match self._pass:
            case None:
                return self._decode_rows()
            case Repair() as repair:
                return repair.next_rows(limit, self._rows_at(self._last_position) if self.output_ids else None)
            case prefill:
                return prefill.next_rows(limit)

    def _decode_rows(self) -> SequenceRows:
        """Return the row of the last token, after those that the step computes exactly once more."""
        assert self.kv is not None
        last = self._last_position
        if not self.kv.is_healing:
            return self._rows_at(last)
        self._exact_rows = self.request.repair.exact_rows(self.kv.lineage, int(last[0]))
        return self._rows_at(np.append(self._exact_rows, last))

    @property
    def _last_position(self) -> NDArray[np.int64]:
        """Position of the last token, which was drawn and has no K/V yet."""
        return np.asarray([self.num_tokens - 1])

    def _rows_at(self, positions: NDArray[np.int64]) -> SequenceRows:
        assert self.kv is not None
        token_ids = self.all_token_ids[positions] if len(positions) > 1 else np.asarray(self.output_ids[-1:])
        kv = self.kv
        return SequenceRows(token_ids, positions, kv.kv_indices, swa_indices=kv.swa_indices, state=kv.state)

    def give_up(self, error: PolicyError) -> None:
        """Compute the prompt in full: the correction of `next_rows` failed."""
        assert self._pass is not None
        assert not isinstance(self._pass, Drafts), "drift is corrected in passes over a grafted prompt"
        self._pass.give_up(error)

    def receive(self, output: SequenceOutput) -> list[StreamPart]:
        """Take the output of `next_rows`; returns the tokens drawn, none while the prompt is being computed."""
        match self._pass:
            case None:
                self._healed_rows()
                return [self._drawn(output.logits[-1])]
            case Repair() as repair:
                repaired = repair.receive(output)
                return [] if repaired is None else self._repaired(repaired)
            case Drafts() as drafts:
                return self._verify(drafts, output)
            case prefill:
                outcome = prefill.receive(output)
                return [] if outcome is None else self._prefilled(prefill, outcome)

    def _prefilled(self, prefill: SparsePrefill, outcome: PrefillOutcome) -> list[StreamPart]:
        """Go on after the last row of the prompt."""
        assert self.kv is not None
        if isinstance(prefill, ScoredPrefill):
            self._prompt_logprobs = tuple(prefill.logprobs)
        self._pass, self.phase = None, Phase.DECODE
        self.kv.lineage.recompute(outcome.work.recomputed_runs)
        is_drafted = self.request.reuse is ReuseMode.VERIFIED and self.kv.lineage.is_approximate
        if not self.output_ids:
            self._report.prefilled(self.kv, outcome)
            self._owes_repair = outcome.repair is not None or self.kv.is_healing
            self._watch(None if is_drafted else self.kv.decision.sampled)
        if is_drafted:
            return self._begin_drafts(self.kv, outcome.logits)
        if self._draft_log.num_drafted:
            return [self._without_drafts(outcome.logits)]
        if outcome.repair is not None:
            return self._begin_repair(outcome.repair, outcome.logits)
        if not self.output_ids:
            return [self._drawn(outcome.logits)]
        was_unrepaired = self.is_unrepaired
        if self.kv.lineage.has_copies:  # begun again where the risk that is held has every answer wait by now
            self._owes_repair = False
            self._report.repaired(self.kv, outcome.work, self._next_token)
        elif not self.kv.lineage.is_approximate:
            self._became_exact()
        # A prompt begun anew for its repair, and without donors to copy by now, goes on with the row of its first token.
        return [] if was_unrepaired else [self._drawn(outcome.logits)]

    def _begin_repair(self, repair: Repair, logits: Tensor) -> list[StreamPart]:
        """Draw the first token and have the policy's choice computed with the next one, or before both if it is unsure."""
        assert self.kv is not None
        self._pass, self.phase = repair, Phase.REPAIR
        if self.output_ids:  # preempted after the first token
            self.kv.is_answered = True
            return []
        reason = reason_if_unsure(logits, self.request.repair.below_margin)
        if not reason:
            self.kv.is_answered = True
            return [self._drawn(logits)]
        self._report.waits(reason)
        return []

    def _repaired(self, outcome: RepairOutcome) -> list[StreamPart]:
        """Go on after the last row of the policy's choice."""
        assert self.kv is not None
        self._pass, self.phase = None, Phase.DECODE
        self.kv.was_repaired(outcome)
        if outcome.is_exact and not self.kv.is_answered:
            self._watch(None)
        self._owes_repair = False
        self._report.repair_ended(self.kv, outcome, self._next_token)
        logits = outcome.next_logits if self.output_ids else outcome.logits
        return [] if logits is None else [self._drawn(logits)]

    @property
    def _next_token(self) -> int:
        """Number of the token of the answer that is drawn next, from 1."""
        return len(self.output_ids) + 1

    def _became_exact(self) -> None:
        """Draw the next token from K/V without copies of the request's own."""
        assert self.kv is not None
        self._owes_repair = False
        self._report.became_exact(self._next_token, is_approximate=self.kv.lineage.is_approximate)

    def _healed_rows(self) -> None:
        """Note the rows that the last decode step computed exactly; where none are left, its token is exact."""
        if not len(self._exact_rows):
            return
        assert self.kv is not None
        stop = int(self._exact_rows[-1]) + 1
        self._report.healed(len(self._exact_rows), self._flops.of_positions(self._exact_rows))
        self._exact_rows = _NO_ROWS
        self.kv.lineage.heal(stop)
        if stop == self.num_tokens - 1:
            self.kv.lineage.healed()
            self._became_exact()

    def _drawn(self, logits: Tensor) -> StreamPart:
        return self._take(self._sampler.sample(logits), logits)

    def _without_drafts(self, logits: Tensor) -> StreamPart:
        """Take the first token of an attempt without a graft after one that drafted: its report is a verified one."""
        self._draft_log.begin((), 0)
        num_retracted = self._draft_log.verified(is_confirmed=False)
        self._report.verified(self._draft_log)
        return replace(self._take(self._sampler.sample(logits), logits), num_retracted=num_retracted)

    def _begin_drafts(self, kv: RequestKV, logits: Tensor) -> list[StreamPart]:
        """Draft after the approximate prompt, and compute the prompt again."""
        drafts = Drafts(kv, self._sampler.fork())
        self._pass, self.phase = drafts, Phase.VERIFYING
        self._draft_text = self._text.fork()
        self._draft_log.begin(kv.lineage.spans, len(self.request.token_ids) - drafts.frontier)
        return self._drafted(drafts) if drafts.draft(logits) else []

    def _drafted(self, drafts: Drafts) -> list[StreamPart]:
        """Note a provisional token."""
        self._draft_log.drafted()
        token_id = drafts.token_ids[-1]
        delta, reason = self._written(self._draft_text, token_id, len(drafts.token_ids))
        drafts.may_go_on = reason is None
        if not self.request.provisional:
            return []
        shown = self._draft_log.shown()
        return [StreamPart(delta, token_id, is_provisional=True, num_retracted=shown, prompt=self._prompt_facts())]

    def _verify(self, drafts: Drafts, output: SequenceOutput) -> list[StreamPart]:
        """Take the output for a piece of the prompt or of the drafts after it."""
        num_drafted, parts = len(drafts.token_ids), []
        for token in drafts.receive(output, self._sampler):
            num_retracted = self._draft_log.verified(is_confirmed=token.is_confirmed)
            parts.append(replace(self._take(token.token_id, token.logits), num_retracted=num_retracted))
            if self.finish_reason is not None:
                break
        if len(drafts.token_ids) > num_drafted:
            parts += self._drafted(drafts)
        if drafts.is_done or self.finish_reason is not None:
            assert self.kv is not None
            self.kv.lineage.healed()
            self._end_drafts()
        return parts

    def _end_drafts(self) -> None:
        """Stop drafting; drafts that are not verified by now are void, and without output there is no report yet."""
        self._pass, self.phase = None, Phase.DECODE
        self._draft_log.retract()
        if self.output_ids:
            self._report.verified(self._draft_log)
        else:
            self._report.forget()

    def _take(self, token_id: int, logits: Tensor) -> StreamPart:
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        if self._evidence is not None:
            self._evidence.add(logits)
        self.output_ids.append(token_id)
        delta, self.finish_reason = self._written(self._text, token_id, len(self.output_ids))
        logprobs = self._sampler.logprobs(logits, token_id)
        is_end = token_id in self._end_ids and not self.request.sampling.include_stop
        return StreamPart(delta, token_id, logprobs=logprobs, prompt=self._prompt_facts(), is_end=is_end)

    def _prompt_facts(self) -> PromptFacts | None:
        """Return the facts of the prompt for the first part; None for all others."""
        if self._is_prompt_reported:
            return None
        self._is_prompt_reported = True
        return PromptFacts(self.request.token_ids, self._prompt_logprobs)

    def _written(self, text: OutputText, token_id: int, num_output: int) -> tuple[str, FinishReason | None]:
        """Add a token to `text`; returns the text that became certain, and why generation ends, or None."""
        sampling = self.request.sampling
        is_end = token_id in self._end_ids
        num_tokens = len(self.request.token_ids) + num_output
        is_full = num_output >= sampling.max_new_tokens or num_tokens >= self._max_model_len
        delta = text.push(token_id) if sampling.include_stop or not is_end else ""
        if is_end or is_full:
            delta += text.flush()
        if is_end or text.stopped:
            return delta, FinishReason.STOP
        return delta, FinishReason.LENGTH if is_full else None

    def _watch(self, sampled: Sampled | None) -> None:
        """Gather evidence for an audit, if the graft was sampled for one; what an earlier attempt was sampled for is void."""
        self._sampled = self._evidence = None
        if sampled is not None and self._loss is not None:
            self._sampled, self._evidence = sampled, AnswerEvidence(self._loss, sampled)

    def audit(self) -> Audit | None:
        """Return the audit of a finished request, if it was sampled."""
        if self._sampled is None or self._evidence is None:
            return None
        output_ids = self.output_ids[: self._evidence.num_tokens]
        return Audit(self.request, output_ids, self._evidence.value(), self._sampled)

    def output(self) -> RequestOutput:
        """Return the result of a finished request."""
        assert self.finish_reason is not None
        assert self.report is not None
        assert self.first_token_at is not None
        assert self.admitted_at is not None
        arrival = self.request.arrival
        return RequestOutput(
            request_id=self.request.request_id,
            prompt_token_ids=self.request.token_ids,
            token_ids=tuple(self.output_ids),
            text=self._text.text,
            finish_reason=self.finish_reason,
            report=self.report,
            ttft_s=self.first_token_at - arrival,
            total_s=time.perf_counter() - arrival,
            queue_s=self.admitted_at - arrival,
            num_preemptions=self.num_preemptions,
            prompt_logprobs=self._prompt_logprobs,
        )
