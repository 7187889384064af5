"""A request on its way: which rows it needs next, and what it does with their output. It runs nothing itself."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.engine.audit import AnswerEvidence, Audit
from kvgraft.engine.report import prompt_report
from kvgraft.engine.request import FinishReason, Request, RequestOutput, StreamPart
from kvgraft.graft.model import SequenceOutput, SequenceRows
from kvgraft.graft.sparse_prefill import SparsePrefill
from kvgraft.types import ReuseMode

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from kvgraft.engine.flops import ModelFlops
    from kvgraft.engine.request_kv import RequestKV
    from kvgraft.engine.risk import Sampled
    from kvgraft.engine.sampling import Sampler
    from kvgraft.engine.text import OutputText
    from kvgraft.fidelity.control import Loss
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
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self._text = text
        self._sampler = sampler
        self._flops = flops
        self._eos_token_ids = eos_token_ids
        self._max_model_len = max_model_len
        self._prefill: SparsePrefill | None = None
        self._loss = loss
        self._sampled: Sampled | None = None
        self._evidence: AnswerEvidence | None = None

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
        return self._prefill is not None

    @property
    def remaining(self) -> NDArray[np.int64]:
        """Positions that the present prefill pass still computes."""
        assert self._prefill is not None
        return self._prefill.remaining

    def piece(self, limit: int) -> int:
        """How many rows `next_rows(limit)` gives of the prefill."""
        assert self._prefill is not None
        return self._prefill.piece(limit)

    @property
    def known_token_ids(self) -> TokenArray:
        """Tokens whose K/V exist once the prompt is computed: all but the last one drawn."""
        return np.concatenate([self.request.token_ids, np.asarray(self.output_ids[:-1], np.int64)])

    def sequence(self) -> Request:
        """What has to be in the cache before the next token: the prompt, or after a preemption the output too.

        Once tokens are out, the sequence is computed again without a graft: what was reported stays true then.
        """
        if not self.output_ids:
            return self.request
        token_ids = np.concatenate([self.request.token_ids, np.asarray(self.output_ids, np.int64)])
        reuse = ReuseMode.OFF if self.request.reuse is ReuseMode.OFF else ReuseMode.EXACT
        return replace(self.request, token_ids=token_ids, reuse=reuse)

    def start(self, kv: RequestKV) -> None:
        """Begin to compute `sequence()`, whose reused K/V lie in the slots of `kv`."""
        self.kv = kv
        request = kv.request
        self._prefill = SparsePrefill(
            request.token_ids,
            kv.plan,
            kv.kv_indices,
            request.policy,
            swa_indices=kv.swa_indices,
            correction=request.correction,
        )
        if self.admitted_at is None:
            self.admitted_at = time.perf_counter()

    def suspend(self) -> TokenArray:
        """Go back to waiting; returns the tokens whose K/V exist in full, none if it was in the middle of its prefill."""
        known = self.request.token_ids[:0] if self.is_prefilling else self.known_token_ids
        self.kv = self._prefill = None
        self.num_preemptions += 1
        return known

    def next_rows(self, limit: int = 1) -> SequenceRows:
        """Rows of the next forward pass, at most `limit` of them but for rows that go together (`SparsePrefill.piece`)."""
        if self._prefill is not None:
            return self._prefill.next_rows(limit)
        assert self.kv is not None
        kv, position = self.kv, self.num_tokens - 1
        return SequenceRows(
            np.asarray(self.output_ids[-1:]), np.asarray([position]), kv.kv_indices, swa_indices=kv.swa_indices
        )

    def receive(self, output: SequenceOutput) -> StreamPart | None:
        """Take the output of `next_rows`; returns the token that came of it, if the prompt is computed."""
        logits = output.logits[-1] if len(output.logits) else None
        if self._prefill is not None:
            outcome = self._prefill.receive(output)
            if outcome is None:
                return None
            assert self.kv is not None
            if self.report is None:
                self.report = prompt_report(self.kv, outcome, self._flops)
                self._watch(self.kv.sampled)
            self._prefill, logits = None, outcome.logits
        assert logits is not None
        token_id = self._sampler.sample(logits)
        return self._take(token_id, logits)

    def _take(self, token_id: int, logits: Tensor) -> StreamPart:
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        if self._evidence is not None:
            self._evidence.add(logits)
        self.output_ids.append(token_id)
        sampling = self.request.sampling
        is_eos = token_id in self._eos_token_ids and not sampling.ignore_eos
        delta = "" if is_eos else self._text.push(token_id)
        is_full = len(self.output_ids) >= sampling.max_new_tokens or self.num_tokens >= self._max_model_len
        if is_eos or is_full:
            delta += self._text.flush()
        if is_eos or self._text.stopped:
            self.finish_reason = FinishReason.STOP
        elif is_full:
            self.finish_reason = FinishReason.LENGTH
        return StreamPart(delta, token_id, logprobs=self._sampler.logprobs(logits, token_id))

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
        )
