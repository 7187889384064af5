"""Next-token logits of a fixed continuation behind a prompt, under any reuse mode; leaves no trace in the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvgraft.engine.report import graft_report
from kvgraft.graft.model import SequenceRows
from kvgraft.graft.sparse_prefill import PrefillOutcome, SparsePrefill

if TYPE_CHECKING:
    from torch import Tensor

    from kvgraft.engine.cache_manager import CacheManager
    from kvgraft.engine.request import Request, RequestCache
    from kvgraft.graft.model import ModelAdapter
    from kvgraft.types import GraftReport, TokenArray


@dataclass(frozen=True, slots=True, eq=False)
class Score:
    """Logits of a continuation.

    Attributes:
        logits: float32 (len(continuation), vocab_size); row i predicts `continuation[i]`.
        report: What was reused for the prompt.
    """

    logits: Tensor
    report: GraftReport


def score(
    adapter: ModelAdapter,
    manager: CacheManager,
    request: Request,
    continuation: TokenArray,
    *,
    max_rows: int,
) -> Score:
    """Prefill `request` as its reuse mode says, then feed `continuation` and collect the logits."""
    cache = manager.begin(request)
    try:
        manager.graft(cache)
        outcome = _prefill(adapter, cache, max_rows)
        logits = [outcome.logits[None]]
        if len(continuation) > 1:
            logits.append(_feed(adapter, manager, cache, continuation[:-1]))
        return Score(torch.cat(logits), graft_report(cache, outcome, manager.flops))
    finally:
        manager.abort(cache)


def _prefill(adapter: ModelAdapter, cache: RequestCache, max_rows: int) -> PrefillOutcome:
    """Run a sparse prefill to its end."""
    request = cache.request
    prefill = SparsePrefill(request.token_ids, cache.plan, cache.kv_indices, request.policy)
    outcome = None
    while outcome is None:
        outcome = prefill.receive(adapter.forward([prefill.next_rows(max_rows)])[0])
    return outcome


def _feed(adapter: ModelAdapter, manager: CacheManager, cache: RequestCache, token_ids: TokenArray) -> Tensor:
    start = len(cache.kv_indices)
    manager.grow(cache, start + len(token_ids))
    positions = np.arange(start, start + len(token_ids))
    rows = SequenceRows(token_ids, positions, cache.kv_indices, num_logits=len(token_ids))
    return adapter.forward([rows])[0].logits
