"""Next-token logits of a fixed continuation behind a prompt, under any reuse mode; leaves no trace in the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvgraft.engine.report import prompt_report
from kvgraft.errors import CapacityError
from kvgraft.graft.model import SequenceRows
from kvgraft.graft.sparse_prefill import PrefillOutcome, SparsePrefill

if TYPE_CHECKING:
    from torch import Tensor

    from kvgraft.engine.cache_manager import CacheManager
    from kvgraft.engine.request import Request
    from kvgraft.engine.request_kv import RequestKV
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
    """Prefill `request` as its reuse mode says, then feed `continuation` and collect the logits.

    Raises:
        ConfigError: The continuation outgrows the angles that its prompt was computed with.
        CapacityError: Running requests hold the slots.
    """
    manager.require_one_table(len(request.token_ids), len(request.token_ids) + len(continuation) - 1)
    kv = manager.begin(request)
    try:
        manager.graft(kv)
        outcome = _prefill(adapter, manager, kv, max_rows)
        logits = [outcome.logits[None]]
        if len(continuation) > 1:
            logits.append(_feed(adapter, manager, kv, continuation[:-1]))
        return Score(torch.cat(logits), prompt_report(kv, outcome, manager.flops))
    finally:
        manager.abort(kv)


def _prefill(adapter: ModelAdapter, manager: CacheManager, kv: RequestKV, max_rows: int) -> PrefillOutcome:
    """Run a sparse prefill to its end; raises `CapacityError` where open streams hold all window slots."""
    request = kv.request
    prefill = SparsePrefill(
        request.token_ids,
        kv.plan,
        kv.kv_indices,
        request.policy,
        swa_indices=kv.swa_indices,
        correction=request.correction,
    )
    outcome = None
    while outcome is None:
        count = manager.reserve(kv, prefill.remaining[: prefill.piece(max_rows)])
        if not count:
            raise CapacityError("running requests hold the slots of window layers; score when they have ended")
        outcome = prefill.receive(adapter.forward([prefill.next_rows(count)])[0])
    return outcome


def _feed(adapter: ModelAdapter, manager: CacheManager, kv: RequestKV, token_ids: TokenArray) -> Tensor:
    """Compute the rows of a continuation and return the logits behind each."""
    start = len(kv.kv_indices)
    piece = manager.longest_piece or len(token_ids)
    logits = []
    for offset in range(0, len(token_ids), piece):
        part = token_ids[offset : offset + piece]
        positions = np.arange(start + offset, start + offset + len(part))
        manager.grow(kv, start + offset + len(part))
        rows = SequenceRows(part, positions, kv.kv_indices, num_logits=len(part), swa_indices=kv.swa_indices)
        logits.append(adapter.forward([rows])[0].logits)
    return torch.cat(logits)
