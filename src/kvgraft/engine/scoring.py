"""Next-token logits of a fixed continuation behind a prompt, under any reuse mode; leaves no trace in the cache."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from kvgraft.engine.report import prompt_report
from kvgraft.errors import CapacityError
from kvgraft.graft.model import SequenceRows
from kvgraft.types import ReuseMode

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from torch import Tensor

    from kvgraft.engine.cache_manager import CacheManager
    from kvgraft.engine.request import Request
    from kvgraft.engine.request_kv import RequestKV
    from kvgraft.graft.model import ModelAdapter
    from kvgraft.graft.sparse_prefill import PrefillOutcome
    from kvgraft.types import GraftReport, TokenArray


Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, eq=False)
class Score:
    """Logits of a continuation.

    Attributes:
        logits: float32 (len(continuation), vocab_size); row i predicts `continuation[i]`.
        report: What was reused for the prompt.
    """

    logits: Tensor
    report: GraftReport


class Probe:
    """A prompt whose K/V are ready, and continuations that are tried behind it one after another.

    Attributes:
        first_logits: float32 (vocab_size,), behind the last prompt token.
        report: What was reused for the prompt.
        can_rewind: Whether a second continuation may follow a first; window slots given back cannot be had again.
    """

    def __init__(self, adapter: ModelAdapter, manager: CacheManager, kv: RequestKV, outcome: PrefillOutcome) -> None:
        self.first_logits = outcome.logits
        self.report = prompt_report(kv, outcome, manager.flops)
        self.can_rewind = manager.longest_piece is None
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
        """Compute `token_ids` as the tokens from `offset` behind the prompt on; what was fed there before is overwritten.

        Returns:
            float32 (len(token_ids), vocab_size), the logits behind each.

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


def _undrafted(request: Request) -> Request:
    """A verified answer is a full prefill's; nothing is drafted here, so there is nothing to graft."""
    return replace(request, reuse=ReuseMode.EXACT) if request.reuse is ReuseMode.VERIFIED else request


@contextmanager
def probe(adapter: ModelAdapter, manager: CacheManager, request: Request, *, max_rows: int) -> Iterator[Probe]:
    """Prefill `request` as its reuse mode says, lend the result, and take everything back.

    Raises:
        CapacityError: Running requests hold the slots.
    """
    kv = manager.begin(_undrafted(request))
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
    """`score` with a yield behind every forward pass; closing it gives the slots back."""
    manager.require_one_table(len(request.token_ids), len(request.token_ids) + len(continuation) - 1)
    kv = manager.begin(_undrafted(request))
    try:
        manager.graft(kv)
        manager.settle(kv)
        outcome = yield from _prefill(adapter, manager, kv, max_rows)
        logits = [outcome.logits[None]]
        if len(continuation) > 1:
            logits.append((yield from _feed(adapter, manager, kv, kv.plan.num_tokens, continuation[:-1])))
        return Score(torch.cat(logits), prompt_report(kv, outcome, manager.flops))
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
) -> Generator[None, None, PrefillOutcome]:
    """Run a sparse prefill to its end; raises `CapacityError` where open streams hold all window slots."""
    prefill = manager.prefill(kv)
    outcome = None
    while outcome is None:
        count = manager.reserve(kv, prefill.remaining[: prefill.piece(max_rows)])
        if not count:
            raise CapacityError("running requests hold the slots of window layers; score when they have ended")
        outcome = prefill.receive(adapter.forward([prefill.next_rows(count)])[0])
        yield
    return outcome


def _feed(
    adapter: ModelAdapter, manager: CacheManager, kv: RequestKV, start: int, token_ids: TokenArray
) -> Generator[None, None, Tensor]:
    """Compute the rows of a continuation from position `start` on and return the logits behind each."""
    piece = manager.longest_piece or len(token_ids)
    logits = []
    for offset in range(0, len(token_ids), piece):
        part = token_ids[offset : offset + piece]
        positions = np.arange(start + offset, start + offset + len(part))
        manager.grow(kv, start + offset + len(part))
        rows = SequenceRows(part, positions, kv.kv_indices, num_logits=len(part), swa_indices=kv.swa_indices)
        logits.append(adapter.forward([rows])[0].logits)
        yield
    return torch.cat(logits)
