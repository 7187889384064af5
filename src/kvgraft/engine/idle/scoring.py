"""Next-token logits of a fixed continuation of a prompt, under any reuse mode; leaves no trace in the cache."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import torch

from kvgraft.engine.schedule.answer_report import AnswerReport
from kvgraft.errors import CapacityError, PolicyError
from kvgraft.graft.first_token import reason_if_unsure
from kvgraft.graft.model import SequenceRows
from kvgraft.types import ReuseMode

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from numpy.typing import NDArray
    from torch import Tensor

    from kvgraft.engine.kv.cache_manager import CacheManager
    from kvgraft.engine.kv.request_kv import RequestKV
    from kvgraft.engine.requests.request import Request
    from kvgraft.graft.model import ModelAdapter, SequenceOutput
    from kvgraft.types import GraftReport, TokenArray


Result = TypeVar("Result")
Outcome_co = TypeVar("Outcome_co", covariant=True)


class Passes(Protocol[Outcome_co]):
    """Passes over a prompt: a `SparsePrefill`, or the `Repair` that it leaves."""

    @property
    def remaining(self) -> NDArray[np.int64]:
        """Positions that the present pass still has to compute."""

    def piece(self, limit: int) -> int:
        """Return how many rows `next_rows(limit)` gives."""

    def next_rows(self, limit: int) -> SequenceRows:
        """Return the next rows."""

    def receive(self, output: SequenceOutput) -> Outcome_co | None:
        """Take the output of `next_rows`; return the outcome at the end."""

    def give_up(self, error: PolicyError) -> None:
        """Compute everything: the pass of `next_rows` failed at its drift correction."""


@dataclass(frozen=True, slots=True, eq=False)
class Score:
    """Logits of a continuation.

    Attributes:
        logits: float32 (len(continuation), vocab_size); row i predicts `continuation[i]`.
        report: Of the prompt.
    """

    logits: Tensor
    report: GraftReport


class Probe:
    """A prompt with its K/V, and continuations that are tried one after another.

    Attributes:
        first_logits: float32 (vocab_size,), after the last prompt token.
        report: Of the prompt.
        can_rewind: A second continuation may follow a first; window slots that were released cannot be had again, and a state
            forgets nothing.
    """

    def __init__(self, adapter: ModelAdapter, manager: CacheManager, kv: RequestKV, first: Score) -> None:
        self.first_logits = first.logits[0]
        self.report = first.report
        self.can_rewind = manager.can_rewind
        self._adapter = adapter
        self._manager = manager
        self._kv = kv
        self._num_fed = 0

    def logits(self, continuation: TokenArray) -> Tensor:
        """Return float32 (len(continuation), vocab_size); row i predicts `continuation[i]`."""
        return torch.cat([self.first_logits[None], self.feed(0, continuation[:-1])])

    def kv(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the prompt in `layer`, each (num_tokens, num_kv_heads, head_dim), to be read only.

        Window layers that gave slots back have no K/V there any more (`can_rewind`).
        """
        num_tokens, windows = self._kv.plan.num_tokens, self._kv.swa_indices
        place = self._adapter.pool.place(
            self._kv.kv_indices[:num_tokens], None if windows is None else windows[:num_tokens]
        )
        return place.read(layer)

    def feed(self, offset: int, token_ids: TokenArray) -> Tensor:
        """Compute `token_ids` as the tokens from `offset` after the prompt on; what was fed there before is overwritten.

        Returns:
            float32 (len(token_ids), vocab_size), the logits after each.

        Raises:
            ConfigError: They outgrow the angles that the prompt was computed with.
        """
        assert offset <= self._num_fed, "there would be positions without K/V"
        assert self.can_rewind or offset == self._num_fed
        self._num_fed = offset + len(token_ids)
        if not len(token_ids):
            return self.first_logits[None][:0]
        num_tokens = self._kv.plan.num_tokens
        self._manager.require_one_table(num_tokens, num_tokens + self._num_fed)
        return _at_once(_feed(self._adapter, self._manager, self._kv, num_tokens + offset, token_ids))


def _undecoded(request: Request) -> Request:
    """Return the request without what only decode steps do.

    A verified answer is a full prefill's, and nothing is drafted here, so there is nothing to graft. Rows that steps compute
    exactly besides their own (`repair_rows`) would keep the windows of the whole prompt waiting for steps that never come.
    """
    request = replace(request, repair=replace(request.repair, rows_per_step=0))
    return replace(request, reuse=ReuseMode.EXACT) if request.reuse is ReuseMode.VERIFIED else request


@contextmanager
def probe(adapter: ModelAdapter, manager: CacheManager, request: Request, *, max_rows: int) -> Iterator[Probe]:
    """Prefill `request` as its reuse mode says, lend the result, and take everything back.

    Raises:
        CapacityError: Running requests hold the slots.
    """
    kv = manager.begin(_undecoded(request), leaves_trace=False)
    try:
        manager.graft(kv)
        manager.settle(kv)
        yield Probe(adapter, manager, kv, _at_once(_prefill(adapter, manager, kv, max_rows)))
    finally:
        manager.abort(kv)


def score(
    adapter: ModelAdapter,
    manager: CacheManager,
    request: Request,
    continuation: TokenArray,
    *,
    max_rows: int,
) -> Score:
    """Prefill `request` as its reuse mode says, then feed `continuation` and collect the logits.

    Raises:
        ConfigError: The continuation outgrows the angles that its prompt was computed with.
        CapacityError: Running requests hold the slots.
    """
    return _at_once(score_steps(adapter, manager, request, continuation, max_rows=max_rows))


def score_steps(
    adapter: ModelAdapter,
    manager: CacheManager,
    request: Request,
    continuation: TokenArray,
    *,
    max_rows: int,
) -> Generator[None, None, Score]:
    """`score` with a yield after every forward pass; closing it gives the slots back."""
    manager.require_one_table(len(request.token_ids), len(request.token_ids) + len(continuation) - 1)
    kv = manager.begin(_undecoded(request), leaves_trace=False)
    try:
        manager.graft(kv)
        manager.settle(kv)
        first = yield from _prefill(adapter, manager, kv, max_rows)
        if len(continuation) == 1:
            return first
        rest = yield from _feed(adapter, manager, kv, kv.plan.num_tokens, continuation[:-1])
        return Score(torch.cat([first.logits, rest]), first.report)
    finally:
        manager.abort(kv)


def _at_once(steps: Generator[None, None, Result]) -> Result:
    """Run `steps` to their end."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result


def _prefill(
    adapter: ModelAdapter, manager: CacheManager, kv: RequestKV, max_rows: int
) -> Generator[None, None, Score]:
    """Run a sparse prefill and its repair to their end; returns the score of the first token.

    It is drawn before the repair, unless it is unsure enough to wait (`repair_below_margin`).
    """
    outcome = yield from _run(adapter, manager, kv, manager.prefill(kv), max_rows)
    kv.lineage.recompute(outcome.work.recomputed_runs)
    report, logits = AnswerReport(manager.flops), outcome.logits
    report.prefilled(kv, outcome)
    if outcome.repair is not None:
        reason = reason_if_unsure(logits, kv.request.repair.below_margin)
        kv.is_answered = not reason
        if reason:
            report.waits(reason)
        repaired = yield from _run(adapter, manager, kv, outcome.repair, max_rows)
        kv.was_repaired(repaired)
        report.repair_ended(kv, repaired, token=2 if kv.is_answered else 1)
        logits = outcome.logits if kv.is_answered else repaired.logits
    assert report.value is not None
    return Score(logits[None], report.value)


def _run(
    adapter: ModelAdapter, manager: CacheManager, kv: RequestKV, passes: Passes[Outcome_co], max_rows: int
) -> Generator[None, None, Outcome_co]:
    """Run `passes` to their end; raises `CapacityError` where open streams hold all window slots."""
    outcome = None
    while outcome is None:
        count = manager.reserve(kv, passes.remaining[: passes.piece(max_rows)])
        if not count:
            raise CapacityError("running requests hold the slots of window layers; score when they have ended")
        try:
            outcome = passes.receive(adapter.forward([passes.next_rows(count)])[0])
        except PolicyError as error:
            passes.give_up(error)
        yield
    return outcome


def _feed(
    adapter: ModelAdapter, manager: CacheManager, kv: RequestKV, start: int, token_ids: TokenArray
) -> Generator[None, None, Tensor]:
    """Compute the rows of a continuation from position `start` on and return the logits after each."""
    piece = manager.longest_piece or len(token_ids)
    logits = []
    for offset in range(0, len(token_ids), piece):
        part = token_ids[offset : offset + piece]
        positions = np.arange(start + offset, start + offset + len(part))
        manager.grow(kv, start + offset + len(part))
        rows = SequenceRows(
            part, positions, kv.kv_indices, num_logits=len(part), swa_indices=kv.swa_indices, state=kv.state
        )
        logits.append(adapter.forward([rows])[0].logits)
        yield
    return torch.cat(logits)
