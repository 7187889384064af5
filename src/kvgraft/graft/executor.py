"""Carry the copying part of a plan out: move donor K/V into the request's own slots, keys rotated once.

Values are copied as they are; keys are rotated from the positions at which the donor was encoded to their new ones. Donor
K/V may lie in slots of the pool or in host memory. The executor reads donors and writes target slots, nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from kvgraft.errors import ModelError
from kvgraft.graft.rope import RopeShift, RopeSpec, rotate_keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from kvgraft.graft.model import ModelAdapter


class KVSource(Protocol):
    """Canonical K/V of consecutive tokens, wherever they are kept."""

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of `layer`, each (num_tokens, num_kv_heads, head_dim), on the pool's device."""


@dataclass(frozen=True, slots=True, eq=False)
class SpanCopy:
    """One span to be carried out.

    Attributes:
        source: K/V of the span's tokens.
        source_start: Position of the first token when its K/V were computed.
        target_start: Position of the first token in the prompt.
        length: Number of tokens.
    """

    source: KVSource
    source_start: int
    target_start: int
    length: int


def copy_spans(
    model: ModelAdapter,
    copies: Sequence[SpanCopy],
    kv_indices: NDArray[np.int64],
    swa_indices: NDArray[np.int64] | None = None,
) -> None:
    """Write the K/V of `copies` into the slots `kv_indices[position]` of a request.

    Where window layers have slots of their own, theirs go to `swa_indices[position]`.

    Raises:
        ModelError: The model refuses shifting and a span would have to be shifted.

    Complexity: O(num_layers * tokens); per layer one read per span, then one rotation and one write for all.
    """
    if not copies:
        return
    target = np.concatenate([np.arange(c.target_start, c.target_start + c.length) for c in copies])
    source = np.concatenate([np.arange(c.source_start, c.source_start + c.length) for c in copies])
    moved = bool((target != source).any())
    if moved and model.rope is None:
        raise ModelError("this model refuses shifted reuse; use reuse='exact'")
    place = model.pool.place(kv_indices[target], None if swa_indices is None else swa_indices[target])
    shifts = _Shifts(source, target, model.pool.device)
    for layer in range(model.num_layers):
        parts = [c.source.read(layer) for c in copies]
        keys = torch.cat([keys for keys, _ in parts]) if len(parts) > 1 else parts[0][0]
        values = torch.cat([values for _, values in parts]) if len(parts) > 1 else parts[0][1]
        spec = model.rope[layer] if moved and model.rope is not None else None
        if spec is not None:
            keys = rotate_keys(keys, shifts.of(spec), spec.pairing)
        place.write(layer, keys, values)


class _Shifts:
    """The rotation of one graft per distinct frequency table; layers mostly share one."""

    def __init__(self, source: NDArray[np.int64], target: NDArray[np.int64], device: torch.device) -> None:
        self._source = torch.from_numpy(source).to(device)
        self._target = torch.from_numpy(target).to(device)
        self._by_table: dict[int, RopeShift] = {}

    def of(self, spec: RopeSpec) -> RopeShift:
        key = id(spec.inv_freq)
        if key not in self._by_table:
            self._by_table[key] = RopeShift.between(self._source, self._target, spec.inv_freq)
        return self._by_table[key]
