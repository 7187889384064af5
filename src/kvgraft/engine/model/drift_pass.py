"""Drift correction of one forward pass: what `graft/drift.py` computes, from and to slots, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvgraft.errors import PolicyError, one_line
from kvgraft.graft.drift_layout import RunLayout
from kvgraft.memory.pool import SlotPool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgraft.graft.drift import DriftCorrection
    from kvgraft.graft.model import SequenceRows
    from kvgraft.graft.rope import RopeSpec
    from kvgraft.memory.hybrid_pool import HybridSlotPool
    from kvgraft.memory.pool import SlotIndex


class CorrectedKV(NamedTuple):
    """K/V to be written into slots of a pool's layer."""

    pool: SlotPool
    layer: int
    slots: SlotIndex
    keys: Tensor
    values: Tensor

    def write(self) -> None:
        """Put them there."""
        self.pool.write(self.layer, self.slots, self.keys, self.values)


@dataclass(frozen=True, slots=True, eq=False)
class _Slots:
    """Places of the tokens of a layout in one space."""

    layout: RunLayout
    sample: SlotIndex
    rest: SlotIndex


class _SequenceDrift:
    """The corrected runs of one sequence of the batch."""

    def __init__(self, rows: SequenceRows, first_row: int, pool: SlotPool | HybridSlotPool) -> None:
        assert rows.drift is not None
        self.correction: DriftCorrection = rows.drift.correction
        runs = rows.drift.runs
        sample, rest = rows.drift.sample, rows.drift.rest
        layout = RunLayout.of(runs, pool.device)
        # Positions of one sequence ascend, so a sampled token's row is where its position stands among them.
        self._rows = torch.from_numpy(first_row + np.searchsorted(rows.positions, sample)).to(pool.device)
        self._slots: dict[int, _Slots] = {}
        if isinstance(pool, SlotPool):
            self._add(pool, layout, rows.kv_indices[sample], rows.kv_indices[rest])
            return
        if pool.full is not None:
            self._add(pool.full, layout, rows.kv_indices[sample], rows.kv_indices[rest])
        assert rows.swa_indices is not None, "rows of a hybrid model have window slots"
        # Tokens that no row sees any more have given theirs back.
        kept = rows.swa_indices[rest] >= 0
        layout = layout.keep_rest(torch.from_numpy(kept).to(pool.device))
        self._add(pool.window, layout, rows.swa_indices[sample], rows.swa_indices[rest[kept]])

    def corrected(
        self, pool: SlotPool, layer: int, keys: Tensor, values: Tensor, rope: RopeSpec | None
    ) -> CorrectedKV | None:
        """Return what the tokens that stay hold from now on in `layer` of `pool`; None if none of them is there.

        Raises:
            PolicyError: The correction failed: its estimator may be foreign code.
        """
        slots, correction = self._slots[id(pool)], self.correction
        if not len(slots.layout.rest_positions):
            return None
        new = keys[self._rows], values[self._rows]
        reused, rest = pool.read(layer, slots.sample), pool.read(layer, slots.rest)
        try:
            corrected = correction.corrected(slots.layout, new, reused, rest, rope)
        except Exception as error:
            name = type(correction.estimator).__name__
            raise PolicyError(f"drift estimator {name}: {one_line(error)}") from error
        return CorrectedKV(pool, layer, slots.rest, *corrected)

    def _add(self, pool: SlotPool, layout: RunLayout, sample: np.ndarray, rest: np.ndarray) -> None:
        self._slots[id(pool)] = _Slots(layout, pool.index(sample), pool.index(rest))


class BatchDrift:
    """All that one forward pass corrects, in all its sequences."""

    def __init__(
        self, batch: Sequence[SequenceRows], pool: SlotPool | HybridSlotPool, rope: Sequence[RopeSpec | None] | None
    ) -> None:
        self._pool = pool
        self._rope = rope
        ends = np.cumsum([len(rows.positions) for rows in batch]).tolist()
        self._sequences = [
            _SequenceDrift(rows, end - len(rows.positions), pool)
            for rows, end in zip(batch, ends, strict=True)
            if rows.drift is not None
        ]

    def corrected(self, layer: int, keys: Tensor, values: Tensor) -> list[CorrectedKV]:
        """Correct one layer; the caller writes the result after the rows' own K/V, so that a failure in here changes nothing.

        Args:
            layer: Number in the model.
            keys: (num_rows, num_kv_heads, head_dim), of the rows of the pass, which do not lie in their slots yet.
            values: Likewise.
        """
        pool, number = (self._pool, layer) if isinstance(self._pool, SlotPool) else self._pool.pool_of(layer)
        rope = None if self._rope is None else self._rope[layer]
        due = (sequence for sequence in self._sequences if layer >= sequence.correction.first_layer)
        found = (sequence.corrected(pool, number, keys, values, rope) for sequence in due)
        return [corrected for corrected in found if corrected is not None]
