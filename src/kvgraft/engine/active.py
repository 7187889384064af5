"""A request on its way: which rows it needs next, and what it does with their output. It runs nothing itself."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.engine.audit import AnswerEvidence, Audit
from kvgraft.engine.drafts import DraftLog, Drafts
from kvgraft.engine.prompt_logprobs import ScoredPrefill, scored
from kvgraft.engine.report import prompt_report
from kvgraft.engine.request import FinishReason, PromptFacts, Request, RequestOutput, StreamPart
from kvgraft.graft.model import SequenceOutput, SequenceRows
from kvgraft.types import ReuseMode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray
    from torch import Tensor

    from kvgraft.engine.flops import ModelFlops
    from kvgraft.engine.request_kv import RequestKV
    from kvgraft.engine.risk import Sampled
    from kvgraft.engine.sampling import Sampler, TokenLogprobs
    from kvgraft.engine.text import OutputText
    from kvgraft.fidelity.control import Loss
    from kvgraft.graft.sparse_prefill import SparsePrefill
    from kvgraft.types import GraftReport, TokenArray


class ActiveRequest:
    """From waiting through prefill and decode to its end; it may be suspended and started again on the way.

    Attributes:
        request: What was asked for.
        kv: Its K/V; None while it waits.
        output_ids: Tokens generated so far.
        finish_reason: Set when nothing more is to be generated.
        report: What was reused; set when the prompt is computed for the first time.
        num_preemptions: How often it was suspended.
        begun_at: `time.perf_counter()` when the lookup of its first attempt began; None if there was none.
        moments: `RequestKV.moments` of the attempt that the report is of, of the last one while there is no report.
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
        self.kv: RequestKV | None = None
        self.output_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.report: GraftReport | None = None
        self.num_preemptions = 0
        self.stored_len = 0
        self.admitted_at: float | None = None
        self.begun_at: float | None = None
        self.moments: Mapping[str, float] = {}
        self.first_token_at: float | None = None
        self._text = text
        self._sampler = sampler
        self._flops = flops
        sampling = request.sampling
        self._end_ids = frozenset(sampling.stop_token_ids).union(() if sampling.ignore_eos else eos_token_ids)
        self._max_model_len = max_model_len
        self._prefill: SparsePrefill | None = None
        self._drafts: Drafts | None = None
        self._draft_text = text
        self._draft_log = DraftLog(request.arrival)
        self._loss = loss
        self._sampled: Sampled | None = None
        self._evidence: AnswerEvidence | None = None
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self._is_prompt_told = False

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
        """Whether there are positions to compute before the next token can be drawn from one row."""
        return self._prefill is not None or self._drafts is not None

    @property
    def is_scored(self) -> bool:
        """Whether logits of all rows of the present prefill pass are kept."""
        return isinstance(self._prefill, ScoredPrefill)

    @property
    def remaining(self) -> NDArray[np.int64]:
        """Positions that the present prefill pass still computes."""
        if self._drafts is not None:
            return self._drafts.remaining
        assert self._prefill is not None
        return self._prefill.remaining

    def piece(self, limit: int) -> int:
        """How many rows `next_rows(limit)` gives of the prefill; a row that drafts comes on top of them."""
        if self._drafts is not None:
            return min(limit, len(self._drafts.remaining))
        assert self._prefill is not None
        return self._prefill.piece(limit)

    @property
    def known_token_ids(self) -> TokenArray:
        """Tokens whose K/V exist once the prompt is computed: all but the last one drawn."""
        return np.concatenate([self.request.token_ids, np.asarray(self.output_ids[:-1], np.int64)])

    @property
    def all_token_ids(self) -> TokenArray:
        """Prompt and output so far."""
        return np.concatenate([self.request.token_ids, np.asarray(self.output_ids, np.int64)])

    def sequence(self) -> Request:
        """What has to be in the cache before the next token: the prompt, or after a preemption the output too.

        Once tokens are out, the sequence is computed again without a graft: what was reported stays true then.
        """
        if not self.output_ids:
            return self.request if self.request.sampling.prompt_logprobs is None else scored(self.request)
        token_ids = self.all_token_ids
        reuse = ReuseMode.OFF if self.request.reuse is ReuseMode.OFF else ReuseMode.EXACT
        return replace(self.request, token_ids=token_ids, reuse=reuse)

    def load(self, kv: RequestKV) -> None:
        """Wait for the part of `kv` that is read from a store; `start` follows."""
        self.kv = kv
        self._note_admission(kv)

    def start(self, kv: RequestKV, prefill: SparsePrefill) -> None:
        """Begin to compute `sequence()`, whose reused K/V lie in the slots of `kv`, with the rows that `prefill` names."""
        self.kv = kv
        kv.stored_len = self.stored_len
        num_logprobs = kv.request.sampling.prompt_logprobs
        if num_logprobs is not None and not self.output_ids:
            prefill = ScoredPrefill(kv, num_logprobs)
        self._prefill = prefill
        self._note_admission(kv)

    def _note_admission(self, kv: RequestKV) -> None:
        if self.admitted_at is None:
            self.admitted_at, self.begun_at = time.perf_counter(), kv.moments.get("lookup")
        if self.report is None:
            self.moments = kv.moments

    def suspend(self) -> TokenArray:
        """Go back to waiting; returns the tokens whose K/V exist in full, none if its prefill was not done."""
        is_loading = self.kv is not None and self.kv.reads is not None
        known = self.request.token_ids[:0] if self.is_prefilling or is_loading else self.known_token_ids
        if self._drafts is not None:
            known = self._drafts.exact_token_ids
            self._end_drafts()
        self.kv = self._prefill = None
        self.num_preemptions += 1
        return known

    def next_rows(self, limit: int = 1) -> SequenceRows:
        """Rows of the next forward pass, at most `limit` of them but for rows that go together (`SparsePrefill.piece`)."""
        if self._drafts is not None:
            return self._drafts.next_rows(limit)
        if self._prefill is not None:
            return self._prefill.next_rows(limit)
        assert self.kv is not None
        kv, position = self.kv, self.num_tokens - 1
        return SequenceRows(
            np.asarray(self.output_ids[-1:]), np.asarray([position]), kv.kv_indices, swa_indices=kv.swa_indices
        )

    def receive(self, output: SequenceOutput) -> list[StreamPart]:
        """Take the output of `next_rows`; returns the tokens that came of it, none while the prompt is being computed."""
        if self._drafts is not None:
            return self._verify(self._drafts, output)
        logits = output.logits[-1] if len(output.logits) else None
        if self._prefill is not None:
            outcome = self._prefill.receive(output)
            if outcome is None:
                return []
            assert self.kv is not None
            if isinstance(self._prefill, ScoredPrefill):
                self._prompt_logprobs = tuple(self._prefill.logprobs)
            self._prefill, logits = None, outcome.logits
            is_drafted = self.request.reuse is ReuseMode.VERIFIED and self.kv.lineage.is_approximate
            if self.report is None:
                self.report = prompt_report(self.kv, outcome, self._flops)
                self._watch(None if is_drafted else self.kv.sampled)
            if is_drafted:
                return self._begin_drafts(self.kv, outcome.logits)
            if self._draft_log.num_drafted:
                return [self._without_drafts(outcome.logits)]
        assert logits is not None
        token_id = self._sampler.sample(logits)
        return [self._take(token_id, logits)]

    def _without_drafts(self, logits: Tensor) -> StreamPart:
        """An earlier attempt drafted, and this one found nothing to graft: its first token, and what is to be said."""
        assert self.report is not None
        self._draft_log.begin((), 0)
        num_retracted = self._draft_log.verified(is_confirmed=False)
        self.report = self._draft_log.healed(self.report, self._flops)
        return replace(self._take(self._sampler.sample(logits), logits), num_retracted=num_retracted)

    def _begin_drafts(self, kv: RequestKV, logits: Tensor) -> list[StreamPart]:
        """The prompt is there, approximately: draft behind it, and compute it again."""
        self._drafts = drafts = Drafts(kv, self._sampler.fork())
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
        """Take what a piece of the prompt or of the drafts behind it tells."""
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
        """Nothing more is drafted; drafts that are not verified by now are void, and if none is, nothing is to be said."""
        assert self.report is not None
        self._drafts = None
        self._draft_log.retract()
        self.report = self._draft_log.healed(self.report, self._flops) if self.output_ids else None

    def _take(self, token_id: int, logits: Tensor) -> StreamPart:
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        if self._evidence is not None:
            self._evidence.add(logits)
        self.output_ids.append(token_id)
        delta, self.finish_reason = self._written(self._text, token_id, len(self.output_ids))
        told = self._sampler.logprobs(logits, token_id)
        return StreamPart(delta, token_id, logprobs=told, prompt=self._prompt_facts())

    def _prompt_facts(self) -> PromptFacts | None:
        """What the first part tells of the prompt; None for all others."""
        if self._is_prompt_told:
            return None
        self._is_prompt_told = True
        return PromptFacts(self.request.token_ids, self._prompt_logprobs)

    def _written(self, text: OutputText, token_id: int, num_output: int) -> tuple[str, FinishReason | None]:
        """Add a token to `text`: what becomes certain of it, and why it ends with so many generated tokens, or None."""
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
        """Gather what an audit needs, if the graft that is served was sampled for one."""
        if sampled is not None and self._loss is not None:
            self._sampled, self._evidence = sampled, AnswerEvidence(self._loss)

    def audit(self) -> Audit | None:
        """What to audit of a finished request, if it was sampled."""
        if self._sampled is None or self._evidence is None:
            return None
        output_ids = self.output_ids[: self._evidence.num_tokens]
        return Audit(self.request, output_ids, self._evidence.value(), self._sampled)

    def output(self) -> RequestOutput:
        """The result of a finished request."""
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
