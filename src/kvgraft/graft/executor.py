"""Carry out the copying part of a plan: donor K/V to the positions of their tokens in a prompt, keys rotated once.

Values are copied as they are; keys are rotated from the positions at which the donor was encoded to their new ones. The
engine names the places of donors and copies: a `KVSource` per span and a `KVPlace` per request. This is the one loop that
moves K/V.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from kvgraft.errors import ModelError
from kvgraft.graft.rope import RopeShift, RopeSpec, rotate_keys

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from kvgraft.memory.block import KVBlock
    from kvgraft.memory.pool import KVPlace


class KVSource(Protocol):
    """Canonical K/V of consecutive tokens, in any memory."""

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of `layer`, each (num_tokens, num_kv_heads, head_dim), on the place's device.

        Views will do: they are not written to.
        """


@dataclass(frozen=True, slots=True, eq=False)
class BlockSource:
    """K/V in host memory."""

    block: KVBlock
    device: torch.device

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Copy one layer to the device; see `KVSource`."""
        keys, values = self.block.keys[layer], self.block.values[layer]
        return keys.to(self.device, non_blocking=True), values.to(self.device, non_blocking=True)


@dataclass(frozen=True, slots=True, eq=False)
class SpanCopy:
    """One span to copy: `source_start` is the position of its first token when its K/V were computed."""

    source: KVSource
    source_start: int
    target_start: int
    length: int


class RotatedSpans:
    """The K/V of spans, keys rotated, one span after the other. Each layer is read when it is asked for.

    Attributes:
        positions: int64, the prompt positions of all tokens, in the order of the spans.
    """

    def __init__(
        self, copies: Sequence[SpanCopy], rope: Sequence[RopeSpec | None] | None, device: torch.device
    ) -> None:
        """Take spans.

        Args:
            copies: At least one span.
            rope: Rotation of keys per layer, None for a layer without RoPE; None if keys must not be moved.
            device: Of the rotation.

        Raises:
            ModelError: Keys must not be moved and a span would have to be.
        """
        self._copies = copies
        self._rope = rope
        self.positions = np.concatenate([np.arange(c.target_start, c.target_start + c.length) for c in copies])
        source = np.concatenate([np.arange(c.source_start, c.source_start + c.length) for c in copies])
        self._is_moved = bool((self.positions != source).any())
        if self._is_moved and rope is None:
            raise ModelError("this model refuses shifted reuse; use reuse='exact'")
        self._source, self._target = torch.from_numpy(source).to(device), torch.from_numpy(self.positions).to(device)
        self._shifts: dict[int, RopeShift] = {}

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of `layer`, each (num_tokens, num_kv_heads, head_dim).

        Complexity: O(tokens); one read per span, then one rotation for all. A single span is not copied to be joined.
        """
        parts = [copy.source.read(layer) for copy in self._copies]
        keys, values = parts[0]
        if len(parts) > 1:
            keys, values = torch.cat([keys for keys, _ in parts]), torch.cat([values for _, values in parts])
        spec = self._rope[layer] if self._is_moved and self._rope is not None else None
        return (keys if spec is None else rotate_keys(keys, self._shift(spec), spec.pairing)), values

    def read_into(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write the result of `read` to two tensors of that shape, which share no memory with the source.

        Complexity: O(tokens). Nothing is made in between.
        """
        spec = self._rope[layer] if self._is_moved and self._rope is not None else None
        start = 0
        for copy in self._copies:
            part = slice(start, start + copy.length)
            source_keys, source_values = copy.source.read(layer)
            if spec is None:
                keys[part] = source_keys
            else:
                rotate_keys(source_keys, self._shift(spec).part(part), spec.pairing, keys[part])
            values[part] = source_values
            start = part.stop

    def _shift(self, spec: RopeSpec) -> RopeShift:
        """Return the rotation under one frequency table; layers mostly share one."""
        key = id(spec.inv_freq)
        if key not in self._shifts:
            self._shifts[key] = RopeShift.between(self._source, self._target, spec.inv_freq)
        return self._shifts[key]


def copy_spans(spans: RotatedSpans, place: KVPlace, layers: Iterable[int]) -> None:
    """Write the K/V of `spans` to `place`, which holds their `positions`.

    Complexity: O(layers * tokens).
    """
    for layer in layers:
        place.write(layer, *spans.read(layer))
