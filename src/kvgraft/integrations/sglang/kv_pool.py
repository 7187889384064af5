"""SGLang's K/V buffers: copy donor K/V into slots with keys rotated, and export slots to host memory."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvgraft.graft.rope import RopeShift, RopeSpec, rotate_keys
from kvgraft.memory.block import KVBlock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """Consecutive tokens to be copied.

    Attributes:
        source: Slots of the pool, int64, or a block in host memory.
        source_position: Position of the first token when its K/V were computed.
        target_position: Position of the first token in the prompt.
        length: Number of tokens.
    """

    source: Tensor | KVBlock
    source_position: int
    target_position: int
    length: int


class KVPool:
    """Keys and values by layer, `(num_slots, num_kv_heads, head_dim)` each, and how each layer's keys are rotated.

    On a GPU all reads and writes are queued on the stream that runs the model. A slot that was just freed may still be
    written to by a forward pass in flight there, and the forward pass that reads the copies is queued there too.
    """

    def __init__(
        self,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        rope: Sequence[RopeSpec],
        forward_stream: torch.cuda.Stream | None = None,
    ) -> None:
        self._keys, self._values, self._rope = tuple(keys), tuple(values), tuple(rope)
        self._stream = forward_stream
        self.device = self._keys[0].device

    @property
    def num_slots(self) -> int:
        """Slots, the padding included."""
        return len(self._keys[0])

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's K/V in all layers."""
        return sum(buffer[0].nbytes for buffer in (*self._keys, *self._values))

    def copy(self, copies: Sequence[Copy], targets: Tensor) -> None:
        """Write `copies`, one behind the other, into the slots `targets` (int64).

        Complexity: O(layers * tokens).
        """
        with self._on_forward_stream():
            first = 0
            for item in copies:
                self._copy_one(item, targets[first : first + item.length])
                first += item.length

    def export(self, slots: Tensor) -> KVBlock:
        """Copy the K/V of `slots` (int64) to host memory; waits until they are there."""
        with self._on_forward_stream():
            keys = tuple(_gather(buffer, slots).cpu() for buffer in self._keys)
            values = tuple(_gather(buffer, slots).cpu() for buffer in self._values)
        return KVBlock(keys, values)

    def _copy_one(self, item: Copy, targets: Tensor) -> None:
        shifts: dict[int, RopeShift] = {}
        moved = item.source_position != item.target_position
        source: slice | Tensor | KVBlock = item.source
        where = _contiguous(targets)
        # A view may be written to another slice of its buffer, but not to scattered rows of it.
        if isinstance(source, torch.Tensor) and isinstance(where, slice):
            source = _contiguous(source)
        for layer, (all_keys, all_values) in enumerate(zip(self._keys, self._values, strict=True)):
            if isinstance(source, KVBlock):
                keys, values = source.keys[layer].to(self.device), source.values[layer].to(self.device)
            else:
                keys, values = all_keys[source], all_values[source]
            all_values[where] = values
            if not moved:
                all_keys[where] = keys
                continue
            spec = self._rope[layer]
            shift = shifts.get(id(spec.inv_freq))
            if shift is None:
                shift = shifts[id(spec.inv_freq)] = self._shift(item, spec)
            all_keys[where] = rotate_keys(keys, shift, spec.pairing)

    def _shift(self, item: Copy, spec: RopeSpec) -> RopeShift:
        steps = torch.arange(item.length, device=self.device)
        return RopeShift.between(steps + item.source_position, steps + item.target_position, spec.inv_freq)

    def _on_forward_stream(self) -> AbstractContextManager[object]:
        if self._stream is None:
            return nullcontext()
        # Slot numbers were computed on the scheduler's stream.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self._stream)


def _contiguous(slots: Tensor) -> slice | Tensor:
    """Return a slice where slots ascend without a gap: views instead of gathers. Only where looking costs no wait."""
    if slots.device.type != "cpu" or not len(slots):
        return slots
    first, last = int(slots[0]), int(slots[-1])
    if last - first + 1 != len(slots) or not bool((slots[1:] - slots[:-1] == 1).all()):
        return slots
    return slice(first, last + 1)


def _gather(buffer: Tensor, slots: Tensor) -> Tensor:
    return buffer.index_select(0, slots)
