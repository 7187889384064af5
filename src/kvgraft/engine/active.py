"""A running request: which rows it needs next, and what it does with their output. It runs nothing itself."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.engine.request import FinishReason, RequestCache, RequestOutput
from kvgraft.graft.model import SequenceOutput, SequenceRows
from kvgraft.graft.sparse_prefill import PrefillOutcome, sparse_prefill
from kvgraft.types import Fidelity, GraftReport, SpanReport

if TYPE_CHECKING:
    from kvgraft.engine.cache_manager import CacheManager
    from kvgraft.engine.flops import ModelFlops
    from kvgraft.engine.sampling import Sampler
    from kvgraft.engine.text import OutputText
    from kvgraft.graft.select import SelectionPolicy
    from kvgraft.types import TokenArray


class ActiveRequest:
    """Prefill, then decode, one forward pass at a time.

    Call `next_rows`, run them, hand the output to `receive`, until `finish_reason` is set; then `close`. The loop may run
    rows of many requests in one pass.
    """

    def __init__(
        self,
        cache: RequestCache,
        manager: CacheManager,
        policy: SelectionPolicy,
        text: OutputText,
        sampler: Sampler,
        *,
        eos_token_ids: frozenset[int],
        max_rows: int,
        max_model_len: int,
        admitted: float,
    ) -> None:
        self.cache = cache
        self.output_ids: list[int] = []
        self.text = text
        self.finish_reason: FinishReason | None = None
        self.prefill_outcome: PrefillOutcome | None = None
        self._manager = manager
        self._policy = policy
        self._sampler = sampler
        self._eos_token_ids = eos_token_ids
        self._max_model_len = max_model_len
        self._admitted = admitted
        self._first_token: float | None = None
        request = cache.request
        self._steps = sparse_prefill(request.token_ids, cache.plan, cache.kv_indices, policy, max_rows=max_rows)
        self._rows = next(self._steps)

    @property
    def is_prefilling(self) -> bool:
        """Whether the prompt is not computed yet."""
        return self.prefill_outcome is None

    def next_rows(self) -> SequenceRows:
        """Rows of the next forward pass."""
        return self._rows

    def receive(self, output: SequenceOutput) -> str:
        """Take the output of `next_rows`; returns the text that became certain by it."""
        if self.prefill_outcome is None:
            try:
                self._rows = self._steps.send(output)
            except StopIteration as done:
                self.prefill_outcome = done.value
            else:
                return ""
            logits = self.prefill_outcome.logits
        else:
            logits = output.logits[-1]
        return self._take(self._sampler.sample(logits))

    def _take(self, token_id: int) -> str:
        if self._first_token is None:
            self._first_token = time.perf_counter()
        self.output_ids.append(token_id)
        request = self.cache.request
        is_eos = token_id in self._eos_token_ids and not request.sampling.ignore_eos
        delta = "" if is_eos else self.text.push(token_id)
        length = len(request.token_ids) + len(self.output_ids)
        if is_eos or self.text.stopped:
            self.finish_reason = FinishReason.STOP
        elif len(self.output_ids) >= request.sampling.max_new_tokens or length >= self._max_model_len:
            self.finish_reason = FinishReason.LENGTH
        if self.finish_reason is not None:
            return delta + self.text.flush()
        self._manager.grow(self.cache)
        position = length - 1
        self._rows = SequenceRows(np.asarray([token_id]), np.asarray([position]), self.cache.kv_indices)
        return delta

    def close(self) -> RequestOutput:
        """Publish what the request computed, release its slots and report."""
        assert self.prefill_outcome is not None
        assert self.finish_reason is not None
        assert self._first_token is not None
        finished = time.perf_counter()
        request = self.cache.request
        report = graft_report(self.cache, self.prefill_outcome, self._policy.name, self._manager.flops)
        known: TokenArray = np.concatenate([request.token_ids, np.asarray(self.output_ids[:-1], np.int64)])
        self._manager.finish(self.cache, known)
        return RequestOutput(
            request_id=request.request_id,
            prompt_token_ids=request.token_ids,
            token_ids=tuple(self.output_ids),
            text=self.text.text,
            finish_reason=self.finish_reason,
            report=report,
            ttft_s=self._first_token - self._admitted,
            total_s=finished - self._admitted,
        )

    def abort(self) -> None:
        """Release the request's slots; nothing of it is kept."""
        self._steps.close()
        self.finish_reason = FinishReason.ABORT
        self._manager.abort(self.cache)


def graft_report(cache: RequestCache, outcome: PrefillOutcome, policy: str, flops: ModelFlops) -> GraftReport:
    """Say what was reused for a request whose prompt is computed."""
    plan = cache.plan
    recomputed = outcome.recomputed(plan)
    spans = tuple(
        SpanReport(
            target_start=match.target_start,
            length=match.length,
            donor_id=match.donor_id,
            donor_start=match.donor_start,
            position_delta=match.target_start - donor.start_position - match.donor_start,
            fidelity=Fidelity.SHIFTED,
            generation=donor.generation,
        )
        for match, donor in zip(plan.spans, cache.donors, strict=True)
    )
    return GraftReport(
        num_tokens=plan.num_tokens,
        exact_tokens=plan.exact_len,
        shifted_tokens=plan.reused_len - recomputed,
        recomputed_tokens=recomputed,
        computed_tokens=len(outcome.computed),
        spans=spans,
        policy=policy if spans else "none",
        timings_ms=dict(cache.timings_ms),
        miss=cache.miss,
        computed_flops=flops.of_positions(outcome.computed),
        full_flops=flops.of_positions(np.arange(plan.num_tokens)),
    )
