"""Compare what a repair after the first token has left of a prompt with what it says: the oracle of its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from tests.support.kept_kv import TOLERANCE, assert_slots_are_exact

from kvgraft.engine.schedule.active import Phase
from kvgraft.graft.model import SequenceRows
from kvgraft.graft.steps import QUERY_ROWS

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from torch import Tensor

    from kvgraft.engine.core import Engine
    from kvgraft.engine.kv.request_kv import RequestKV
    from kvgraft.engine.schedule.active import ActiveRequest

TWICE = frozenset({"adaptive"})
"""Policies of several passes: rows of an earlier one attended to what a later one has changed."""
LOOKS = frozenset({"kv_deviation"})
"""Policies with looks that write the first layers of all rows."""


class RepairedKV:
    """Looks at all requests of an engine after each step. For models with one space of slots.

    - Rows that a repair computed are what the model computes there over what the repair has left, at these positions.
    - Other tokens are what was copied, but for as many as the report says are corrected.
    - After a policy that failed all is what a full prefill gives.
    """

    def __init__(self, engine: Engine, forward: Callable[[list[SequenceRows]], object]) -> None:
        """Watch `engine`; `forward` runs rows unobserved."""
        self.num_seen = 0
        self._engine, self._forward = engine, forward
        self._copies: dict[str, tuple[RequestKV, list[Tensor]]] = {}

    def look(self) -> None:
        for active in self._engine.scheduler.running:
            name, kv = active.request.request_id, active.kv
            if kv is not None and active.phase is Phase.REPAIR:
                if name not in self._copies or self._copies[name][0] is not kv:
                    self._copies[name] = (kv, self._read(kv, np.arange(kv.plan.num_tokens)))
            elif name in self._copies and active.phase is Phase.DECODE:
                looked_at, copies = self._copies.pop(name)
                if looked_at is kv and kv.epoch == self._engine.space.epoch:
                    self._assert_repaired(active, kv, copies)

    def _read(self, kv: RequestKV, rows: NDArray[np.int64]) -> list[Tensor]:
        place = self._engine.adapter.pool.place(kv.kv_indices[rows])
        return [part.clone() for layer in range(self._engine.adapter.num_layers) for part in place.read(layer)]

    def _assert_repaired(self, active: ActiveRequest, kv: RequestKV, copies: list[Tensor]) -> None:
        self.num_seen += 1
        report, policy, num_tokens = active.report, kv.decision.policy, kv.plan.num_tokens
        assert report is not None
        if not kv.lineage.is_approximate:
            assert report.repair is not None
            assert report.repair.exact_from_token is not None
            assert_slots_are_exact(self._engine.adapter, kv.kv_indices, active.known_token_ids)
            return
        is_computed = np.zeros(num_tokens, np.bool_)
        for start, length in kv.lineage.recomputed_runs:
            is_computed[start : start + length] = True
        is_live = np.zeros(num_tokens, np.bool_)
        is_live[kv.plan.compute] = True
        left = self._read(kv, np.arange(num_tokens))
        is_changed = np.any([(was != now).flatten(1).any(1).numpy() for was, now in zip(copies, left, strict=True)], 0)
        is_copied = ~is_computed & ~is_live
        assert policy is not None
        if policy.name not in LOOKS:
            assert int((is_changed & is_copied).sum()) == report.corrected_tokens
        assert not is_changed[: kv.plan.prefix_len].any()
        rows = np.flatnonzero(is_computed)
        if not len(rows) or policy.name in TWICE:
            rows = np.arange(num_tokens - 1, num_tokens)
        else:
            query = kv.plan.compute[-QUERY_ROWS:]
            rows = np.union1d(rows, query[query > rows[0]])
        self._assert_computed(kv, rows)

    def _assert_computed(self, kv: RequestKV, rows: NDArray[np.int64]) -> None:
        """Compute `rows` once more, in order, and put back what was there."""
        adapter = self._engine.adapter
        token_ids, place = kv.request.token_ids, adapter.pool.place(kv.kv_indices[rows])
        left = self._read(kv, rows)
        self._forward([SequenceRows(token_ids[rows], rows, kv.kv_indices, seq_len=len(token_ids))])
        for number, (was, now) in enumerate(zip(left, self._read(kv, rows), strict=True)):
            error = float((was - now).abs().max())
            assert error <= TOLERANCE * float(now.abs().max()), f"layer {number // 2} of a repair: {error}"
        for layer in range(adapter.num_layers):
            place.write(layer, *left[2 * layer : 2 * layer + 2])
