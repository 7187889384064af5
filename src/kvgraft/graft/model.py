"""The interface of models: the `ModelAdapter` protocol and the rows of a packed forward pass.

A *sparse forward* runs the model over chosen positions of one or more sequences. Each layer writes their K/V into the
sequences' slots before attention reads all slots below the row's position, so every computed row is exact given the K/V
in the slots. Engines implement the protocol; this module holds no model code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from kvgraft.graft.drift import DriftCorrection
    from kvgraft.graft.drift_layout import DriftRun
    from kvgraft.graft.rope import RopeSpec
    from kvgraft.memory.pool import KVPool

NO_SNAPSHOTS: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True, eq=False)
class DriftRuns:
    """Runs that a forward pass corrects in one sequence, at least one; all rows of a run are among those of the pass."""

    correction: DriftCorrection
    runs: tuple[DriftRun, ...]

    @property
    def sample(self) -> NDArray[np.int64]:
        """Positions of the sampled tokens, run after run."""
        return np.concatenate([run.sample for run in self.runs])

    @property
    def rest(self) -> NDArray[np.int64]:
        """Positions of the corrected tokens, run after run."""
        return np.concatenate([run.rest for run in self.runs])


@dataclass(frozen=True, slots=True, eq=False)
class SequenceRows:
    """The positions of one sequence that a forward pass computes.

    Attributes:
        token_ids: int64 (num_rows,), the tokens at `positions`.
        positions: int64 (num_rows,), strictly ascending.
        kv_indices: int64, the slot of each position of the sequence; at least `positions[-1] + 1` entries.
        num_logits: How many of the last rows to return logits for.
        observed_rows: How many of the last rows have their attention summed per key position (0: none).
        swa_indices: int64, like `kv_indices` the slots of sliding-window layers where these have slots of their own; -1 where
            they were given back. Those of the rows, and of the window before the first, must be there.
        seq_len: Tokens of the sequence of which these rows are a piece; angles of some models depend on it. 0 if the last row
            is its end.
        drift: Runs to correct in every layer, between the write of the rows' K/V and attention; None for none.
        deviation_layer: Run the rows only as far as the keys of this layer and compare them with those in the slots, which
            stay; earlier layers are written. There are no logits then. 0 to run all layers.
        is_abandoned: Asked at every layer of a pass that these rows have for themselves: True ends the pass, and its K/V are
            worth nothing. None for a pass that runs to its end.
        state: Of a model with layers that keep a state, the slot of this sequence's. The rows are the next positions of that
            state, without a gap; a pass that ends well has moved it behind the last of them, any other leaves it alone, so
            that the same rows can be computed again.
        snapshots: Slots for copies of that state, by the number of tokens that each is to have read. A pass that ends well
            has filled those that its rows reach; others are left alone. Read when the pass begins.
    """

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    kv_indices: NDArray[np.int64]
    num_logits: int = 1
    observed_rows: int = 0
    swa_indices: NDArray[np.int64] | None = None
    seq_len: int = 0
    drift: DriftRuns | None = None
    deviation_layer: int = 0
    is_abandoned: Callable[[], bool] | None = None
    state: int | None = None
    snapshots: Mapping[int, int] = field(default_factory=lambda: NO_SNAPSHOTS)


@dataclass(frozen=True, slots=True, eq=False)
class SequenceOutput:
    """The result of a forward pass for one sequence.

    Attributes:
        logits: float32 (num_logits, vocab_size), on the model's device.
        attention_mass: float32 (positions[-1] + 1,), attention of the observed rows on each position, summed over rows,
            heads and layers; None if no row was observed.
        key_deviation: float32 (num_rows,), squared distance of each row's key from the one in its slot, summed over heads and
            channels of `deviation_layer`; None without one.
    """

    logits: Tensor
    attention_mass: Tensor | None
    key_deviation: Tensor | None = None


class PassAbandonedError(Exception):
    """A forward pass ended before its end because `SequenceRows.is_abandoned` said so; its slots hold K/V of no use.

    Its state, where the model keeps one, is the one from before the pass: the rows may be computed again, or others.
    """


class ModelAdapter(Protocol):
    """A decoder with K/V in slots."""

    @property
    def num_layers(self) -> int:
        """Number of attention layers."""

    @property
    def pool(self) -> KVPool:
        """The slots that `forward` writes and reads."""

    @property
    def rope(self) -> Sequence[RopeSpec | None] | None:
        """Rotation of keys per layer (None: the layer has no RoPE); None if shifting is refused for this model."""

    def forward(self, batch: Sequence[SequenceRows]) -> list[SequenceOutput]:
        """Compute `batch` in one pass; writes the K/V of its rows into their slots.

        Raises:
            PassAbandonedError: `is_abandoned` of the only sequence became true on the way.
        """
