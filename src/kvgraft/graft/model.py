"""What a graft needs from a model: the `ModelAdapter` protocol and the rows of a packed forward pass.

A *sparse forward* runs the model over chosen positions of one or more sequences. Each layer writes their K/V into the
sequences' slots before attention reads all slots below the row's position, so every computed row is exact given what
lies in the slots. Engines implement the protocol; this module holds no model code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from kvgraft.graft.drift import DriftCorrection
    from kvgraft.graft.drift_layout import DriftRun
    from kvgraft.graft.rope import RopeSpec
    from kvgraft.memory.pool import KVPool


@dataclass(frozen=True, slots=True, eq=False)
class DriftRuns:
    """What a forward pass corrects in one sequence (`graft/drift.py`).

    Attributes:
        correction: How.
        runs: Where, at least one. All rows of a run are among those of the pass.
    """

    correction: DriftCorrection
    runs: tuple[DriftRun, ...]


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
            they were given back. Those of the rows, and of the window in front of the first, must be there.
        seq_len: Tokens of the sequence of which these rows are a piece; angles of some models depend on it. 0 if the last row
            is its end.
        drift: In every layer, between the write of the rows' K/V and attention, correct these runs; None for nothing.
        deviation_layer: Run the rows only as far as the keys of this layer and compare them with what lies in the slots and
            stays there; layers in front of it are written. There are no logits then. 0 to run all layers.
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


@dataclass(frozen=True, slots=True, eq=False)
class SequenceOutput:
    """What a forward pass returns for one sequence.

    Attributes:
        logits: float32 (num_logits, vocab_size), on the model's device.
        attention_mass: float32 (positions[-1] + 1,), attention of the observed rows on each position, summed over rows,
            heads and layers; None if no row was observed.
        key_deviation: float32 (num_rows,), squared distance of each row's key from the one in its slot, summed over heads and
            channels of the layer that was asked for; None where none was.
    """

    logits: Tensor
    attention_mass: Tensor | None
    key_deviation: Tensor | None = None


class ModelAdapter(Protocol):
    """A decoder whose K/V live in slots."""

    @property
    def num_layers(self) -> int:
        """Number of attention layers."""

    @property
    def pool(self) -> KVPool:
        """The slots that `forward` writes and reads."""

    @property
    def rope(self) -> Sequence[RopeSpec | None] | None:
        """Per layer how keys rotate (None: the layer has no RoPE); None if shifting is refused for this model."""

    def forward(self, batch: Sequence[SequenceRows]) -> list[SequenceOutput]:
        """Compute `batch` in one pass; writes the K/V of its rows into their slots."""
