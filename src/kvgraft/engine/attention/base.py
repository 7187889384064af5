"""The interface of attention backends: rows of several sequences against the K/V in a pool.

A backend is asked twice: once per forward pass to lay out the batch (`plan`), then once per layer (`attend`). It is given
any mixture of decode rows, prefill chunks and scattered rows, and must honour causality by position, windows, soft
caps and attention sinks. Add one by implementing the two protocols and naming it in `choose.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvgraft.graft.model import SequenceRows
    from kvgraft.memory.pool import SlotPool
    from kvgraft.windows import WindowKind


@dataclass(frozen=True, slots=True, eq=False)
class LayerQuery:
    """Queries of one layer.

    Attributes:
        query: (num_heads, num_rows, head_dim), the rows of all sequences one after another.
        scale: Factor of the scores.
        window: Which keys a row sees; None for all up to its own.
        softcap: Bound of the scores, `softcap * tanh(score / softcap)`; None for none.
        sinks: (num_heads,), per head the score of one more key with the value 0, which every row sees; None for none.
    """

    query: Tensor
    scale: float
    window: WindowKind | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


class BatchAttention(Protocol):
    """Attention of one forward pass."""

    @property
    def masses(self) -> Sequence[Tensor | None]:
        """Per sequence the attention that its observed rows paid to each position, summed over the layers run so far."""

    def attend(self, layer: int, query: LayerQuery) -> Tensor:
        """Return (num_heads, num_rows, head_dim). The rows' own K/V lie in their slots already."""


class AttentionBackend(Protocol):
    """Makes a `BatchAttention` for each forward pass."""

    @property
    def name(self) -> str:
        """Its name in the setting `attention`."""

    def plan(self, batch: Sequence[SequenceRows], pool: SlotPool) -> BatchAttention:
        """Lay out `batch`; everything that all layers share is done here, once."""
