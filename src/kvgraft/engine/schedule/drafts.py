"""Answers of `reuse="verified"`: tokens drafted from a graft while its prompt is computed again.

Positions before the *exact frontier* hold the K/V of a full prefill. Each pass computes the next piece after it, in the
request's own slots, and beside it one row that drafts a token from what there is, approximate or not. When the frontier
reaches the prompt's last row, the drafted tokens are computed like a continuation of the prompt, many in one pass: row by row
the true sampler says what follows, which confirms a draft or ends them.

The true sampler sees the logits of a full prefill in their order and nothing else, so the answer is what it would be without
a graft, also when tokens are drawn at random. Verifying many drafted tokens in one pass is speculative decoding (Leviathan et
al., https://arxiv.org/abs/2211.17192); common random numbers take the place of its rejection rule: `Sampler.fork`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvgraft.errors import RequestError
from kvgraft.graft.model import SequenceOutput, SequenceRows
from kvgraft.reuse.verified import verified_report
from kvgraft.types import HealingReport

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from torch import Tensor

    from kvgraft.engine.kv.request_kv import RequestKV
    from kvgraft.engine.model.flops import ModelFlops
    from kvgraft.engine.sampling.sampling import Sampler
    from kvgraft.types import GraftReport, SpanReport, TokenArray


class VerifiedToken(NamedTuple):
    """A token of the answer, the logits that it was drawn from, and whether it had been drafted."""

    token_id: int
    logits: Tensor
    is_confirmed: bool


class Drafts:
    """The drafted tokens of one request and its exact frontier. Runs nothing itself; used like `SparsePrefill`.

    Attributes:
        token_ids: Drafted tokens, the first right after the prompt; confirmed ones, too.
        frontier: Positions before it are exact.
        may_go_on: A further token may be drafted; the owner sets it to False at the end of the text.
        is_done: Nothing is left to verify; the request goes on as any other.
    """

    def __init__(self, kv: RequestKV, sampler: Sampler) -> None:
        """Begin after the prompt of `kv`, with its graft in its slots.

        Args:
            kv: The request's slots, of which `draft_room` after the prompt are for drafts.
            sampler: Draws drafts; a fork of the one that draws the answer.
        """
        self.token_ids: list[int] = []
        self.frontier = kv.lineage.exact_len(kv.plan.num_tokens)
        self.may_go_on = True
        self.is_done = False
        self._kv = kv
        self._sampler = sampler
        self._pending: NDArray[np.int64] = np.empty(0, np.int64)
        self._has_draft_row = False

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return self._kv.plan.num_tokens

    @property
    def remaining(self) -> NDArray[np.int64]:
        """Positions that are still to be computed, as far as they are known."""
        return np.arange(self.frontier, self._end)

    def piece(self, limit: int) -> int:
        """How many rows of the prompt `next_rows(limit)` gives."""
        return min(limit, self._end - self.frontier)

    def draft(self, logits: Tensor) -> bool:
        """Draw the next provisional token; False if its rules or structure fail, the answer's do not fail with it."""
        try:
            self.token_ids.append(self._sampler.sample(logits))
        except RequestError:  # NothingToDrawError is one
            self.may_go_on = False
            return False
        return True

    def next_rows(self, limit: int) -> SequenceRows:
        """The next piece, at most `limit` rows, and the row of the last draft if another one may follow."""
        kv, num_tokens = self._kv, self.prompt_len
        stop = min(self.frontier + limit, self._end)
        self._pending = np.arange(self.frontier, stop)
        num_logits = max(0, stop - max(self.frontier, num_tokens - 1))
        # After the prompt's last row the true token is known soon: nothing is drafted then.
        self._has_draft_row = not num_logits and self.may_go_on and len(self.token_ids) < kv.draft_room
        positions = self._pending
        if self._has_draft_row:
            positions, num_logits = np.append(positions, num_tokens + len(self.token_ids) - 1), 1
        return SequenceRows(
            self._token_ids()[positions],
            positions,
            kv.kv_indices,
            num_logits=num_logits,
            swa_indices=kv.swa_indices,
            seq_len=num_tokens,
        )

    @property
    def exact_token_ids(self) -> TokenArray:
        """Tokens before the frontier."""
        return self._token_ids()[: self.frontier]

    def receive(self, output: SequenceOutput, sampler: Sampler) -> Iterator[VerifiedToken]:
        """Take the output of `next_rows`: draft if it has a row for that, and yield the tokens of the answer.

        A caller that needs no more tokens stops; the frontier is right after each.

        Args:
            output: Of the pass.
            sampler: Draws the answer.
        """
        stop = int(self._pending[-1]) + 1
        if stop < self.prompt_len:
            self._advance(stop)
            if self._has_draft_row:
                self.draft(output.logits[-1])
            return
        verified = range(max(self.frontier, self.prompt_len - 1), stop)
        for position, logits in zip(verified, output.logits, strict=True):
            token_id = sampler.sample(logits)
            self._advance(position + 1)
            index = position + 1 - self.prompt_len
            is_confirmed = index < len(self.token_ids) and self.token_ids[index] == token_id
            self.is_done = not is_confirmed or self.frontier == self._end
            yield VerifiedToken(token_id, logits, is_confirmed)
            if self.is_done:
                return

    @property
    def _end(self) -> int:
        """First position after the prompt and those drafts that have a slot."""
        return self.prompt_len + min(len(self.token_ids), self._kv.draft_room)

    def _token_ids(self) -> TokenArray:
        return np.concatenate([self._kv.request.token_ids, np.asarray(self.token_ids, np.int64)])

    def _advance(self, frontier: int) -> None:
        self.frontier = frontier
        self._kv.lineage.heal(frontier)


@dataclass(slots=True)
class DraftLog:
    """Drafts of one request, counted over all its attempts.

    Attributes:
        arrival: When it came, `time.perf_counter()`.
        spans: Copies that the last attempt's drafts attended to.
        healed_tokens: Positions of the prompt that it computed again.
        num_drafted: Provisional tokens.
        num_confirmed: Of them, tokens of the answer.
    """

    arrival: float
    spans: tuple[SpanReport, ...] = ()
    healed_tokens: int = 0
    num_drafted: int = 0
    num_confirmed: int = 0
    _first_provisional_s: float | None = None
    _first_verified_s: float | None = None
    _num_outstanding: int = 0
    _num_void: int = 0

    def begin(self, spans: tuple[SpanReport, ...], healed_tokens: int) -> None:
        """Begin an attempt that drafts after `spans`."""
        self.spans, self.healed_tokens = spans, healed_tokens

    def drafted(self) -> None:
        """Count a drafted token."""
        self.num_drafted += 1
        if self._first_provisional_s is None:
            self._first_provisional_s = time.perf_counter() - self.arrival

    def shown(self) -> int:
        """Count a drafted token that the client gets; returns how many it takes back before that."""
        self._num_outstanding += 1
        return self._taken_back()

    def verified(self, *, is_confirmed: bool) -> int:
        """Count a token of the answer; returns how many drafts the client takes back before it."""
        self.num_confirmed += is_confirmed
        if self._first_verified_s is None:
            self._first_verified_s = time.perf_counter() - self.arrival
        self._num_outstanding = max(0, self._num_outstanding - 1) if is_confirmed else 0
        return self._taken_back()

    def retract(self) -> None:
        """End the attempt: outstanding drafts will not be verified."""
        self._num_void += self._num_outstanding
        self._num_outstanding = 0

    def healed(self, report: GraftReport, flops: ModelFlops) -> GraftReport:
        """Return the report of the request when nothing approximate is left.

        Args:
            report: Of its graft.
            flops: Cost of computing.
        """
        num_tokens = report.num_tokens
        healing = HealingReport(
            self.spans,
            self.healed_tokens,
            self.num_drafted,
            self.num_drafted - self.num_confirmed,
            self._first_provisional_s or 0.0,
            self._first_verified_s or 0.0,
            time.perf_counter() - self.arrival,
        )
        again = flops.of_positions(np.arange(num_tokens - self.healed_tokens, num_tokens))
        return verified_report(report, healing, again)

    def _taken_back(self) -> int:
        num_void, self._num_void = self._num_void, 0
        return num_void
