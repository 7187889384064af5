"""Log-probabilities of a prompt's tokens: a full prefill that keeps logits of all rows, some at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvgraft.engine.sampling.sampling import TokenLogprobs, token_logprobs
from kvgraft.graft.model import SequenceOutput, SequenceRows
from kvgraft.graft.select import NoRecompute
from kvgraft.graft.sparse_prefill import PrefillOutcome, SparsePrefill
from kvgraft.graft.steps import GraftSteps
from kvgraft.types import ReuseMode

if TYPE_CHECKING:
    from kvgraft.engine.kv.request_kv import RequestKV
    from kvgraft.engine.requests.request import Request

MOST_ROWS = 256
"""Rows of a forward pass, of all requests together, that keep logits over the whole vocabulary."""


def scored(request: Request) -> Request:
    """Return `request` such that all of its prompt is computed: cached K/V have no logits."""
    return replace(request, reuse=ReuseMode.OFF, policy=NoRecompute(), correction=None)


class ScoredPrefill(SparsePrefill):
    """The prefill of a prompt of which nothing is reused.

    Attributes:
        logprobs: Of the prompt's tokens as far as they are known, the first of them None.
    """

    def __init__(self, kv: RequestKV, count: int) -> None:
        """Begin.

        Args:
            kv: Of a request that is `scored`.
            count: Most likely tokens to name in each place.
        """
        token_ids = kv.request.token_ids
        steps = GraftSteps(kv.plan, kv.request.policy)
        super().__init__(
            token_ids,
            kv.kv_indices,
            steps,
            swa_indices=kv.swa_indices,
            state=kv.state,
            snapshots=kv.snapshots,
        )
        self.logprobs: list[TokenLogprobs | None] = [None]
        self._ids: list[int] = token_ids.tolist()
        self._count = count

    def next_rows(self, limit: int) -> SequenceRows:
        """As for any prefill, with the logits of all rows."""
        rows = super().next_rows(limit)
        return replace(rows, num_logits=len(rows.positions))

    def receive(self, output: SequenceOutput) -> PrefillOutcome | None:
        """Take the output of `next_rows`; of its logits only those of the last row are kept."""
        start = len(self.logprobs)
        following = self._ids[start : start + len(output.logits)]
        self.logprobs += token_logprobs(output.logits[: len(following)], following, self._count)
        return super().receive(SequenceOutput(output.logits[-1:], None))
