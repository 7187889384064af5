"""SGLang's K/V buffers: the slots that copies are read from and written to, and exports to host memory."""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvgraft.graft.executor import BlockSource, RotatedSpans, copy_spans
from kvgraft.memory.block import KVBlock
from kvgraft.memory.packed import packed
from kvgraft.memory.store.layout import Field, RowLayout

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from kvgraft.graft.executor import KVSource, SpanCopy
    from kvgraft.graft.rope import RopeSpec


class KVBuffers:
    """Keys and values by layer, `(num_slots, num_kv_heads, head_dim)` each, and how each layer's keys are rotated.

    On a GPU all reads and writes are queued on the forward stream: a slot that was just freed may still be written to by a
    pass in flight there. They come after what the caller's stream has and before what it gets next (`on_forward_stream`).
    """

    def __init__(
        self,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        rope: Sequence[RopeSpec],
        forward_stream: torch.cuda.Stream | None = None,
    ) -> None:
        self.keys, self.values = tuple(keys), tuple(values)
        self.rope = tuple(rope)
        self._stream = forward_stream
        self.device = self.keys[0].device

    @property
    def num_slots(self) -> int:
        """Slots, the padding included."""
        return len(self.keys[0])

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's K/V in all layers."""
        return sum(buffer[0].nbytes for buffer in (*self.keys, *self.values))

    def row_layout(self) -> RowLayout:
        """Return the layout of a token's K/V in a row of a store."""
        pairs = zip(self.keys, self.values, strict=True)
        fields = tuple(Field(buffer.shape[1], buffer.shape[2], buffer.dtype) for pair in pairs for buffer in pair)
        return RowLayout(fields, "; ".join(map(_described, dict.fromkeys(self.rope))))

    def source(self, kv: Tensor | KVBlock) -> KVSource:
        """Return where the K/V of slots (int64), or of a block in host memory, are read from."""
        return BlockSource(kv, self.device) if isinstance(kv, KVBlock) else self.place(kv)

    def place(self, slots: Tensor) -> BufferSlots:
        """Return `slots`, int64, to read from and write to."""
        return BufferSlots(self, slots)

    def copy(self, copies: Sequence[SpanCopy], targets: Tensor) -> None:
        """Write `copies`, one after the other, into the slots `targets` (int64).

        The targets are new, so that none of them is a source.

        Complexity: O(layers * tokens).
        """
        with self.on_forward_stream():
            spans, place = RotatedSpans(copies, self.rope, self.device), self.place(targets)
            if isinstance(place.index, slice):
                for layer in range(len(self.keys)):
                    spans.read_into(layer, self.keys[layer][place.index], self.values[layer][place.index])
            else:
                copy_spans(spans, place, range(len(self.keys)))

    def export(self, slots: Tensor) -> KVBlock:
        """Copy the K/V of `slots` (int64) to host memory; waits until they are there."""
        with self.on_forward_stream():
            keys = tuple(buffer.index_select(0, slots) for buffer in self.keys)
            values = tuple(buffer.index_select(0, slots) for buffer in self.values)
            return packed([KVBlock(keys, values)])

    def begin_export(self, slots: Tensor) -> Export:
        """Copy the K/V of `slots` (int64) to host memory without waiting; later writes to the slots come after the copy."""
        with self.on_forward_stream():
            keys = tuple(buffer.index_select(0, slots).to("cpu", non_blocking=True) for buffer in self.keys)
            values = tuple(buffer.index_select(0, slots).to("cpu", non_blocking=True) for buffer in self.values)
            if self._stream is None:
                return Export(KVBlock(keys, values))
            copied = torch.cuda.Event()
            copied.record(self._stream)
        return Export(KVBlock(keys, values), copied)

    @contextmanager
    def on_forward_stream(self) -> Iterator[None]:
        """Queue the block's work after all that this stream and the caller's have so far, and before all that either gets.

        Without overlap scheduling SGLang runs the model on the scheduler's stream, so that passes before and after the work
        are there; and memory of slot numbers, which the work reads, is the scheduler's stream's to use again.
        """
        if self._stream is None:
            yield
            return
        caller = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(caller)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            caller.wait_stream(self._stream)


@dataclass(frozen=True, slots=True, eq=False)
class Export:
    """K/V on their way to host memory.

    Attributes:
        block: To be read once `is_ready`.
        copied: Recorded after the copy; None if nothing is under way.
    """

    block: KVBlock
    copied: torch.cuda.Event | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return self.block.num_tokens

    @property
    def is_ready(self) -> bool:
        """Whether they are there."""
        return self.copied is None or bool(self.copied.query())


@dataclass(frozen=True, slots=True, eq=False)
class BufferSlots:
    """Some slots: a `KVSource` and a `KVPlace`. Reading gives views where they ascend without a gap."""

    buffers: KVBuffers
    index: Tensor | slice

    def __post_init__(self) -> None:
        assert isinstance(self.index, torch.Tensor)
        object.__setattr__(self, "index", _contiguous(self.index))

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each (num_slots, num_kv_heads, head_dim)."""
        return self.buffers.keys[layer][self.index], self.buffers.values[layer][self.index]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Put keys and values of one layer there, in the buffers' dtype."""
        self._write(self.buffers.keys[layer], keys)
        self._write(self.buffers.values[layer], values)

    def _write(self, buffer: Tensor, rows: Tensor) -> None:
        # A view may be written to another slice of its buffer, but not to scattered rows of it.
        is_view = rows.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        buffer[self.index] = rows.clone() if is_view and not isinstance(self.index, slice) else rows


def _contiguous(slots: Tensor) -> slice | Tensor:
    """Return a slice where slots ascend without a gap: views instead of gathers. Only where looking costs no wait."""
    if slots.device.type != "cpu" or not len(slots):
        return slots
    first, last = int(slots[0]), int(slots[-1])
    if last - first + 1 != len(slots) or not bool((slots[1:] - slots[:-1] == 1).all()):
        return slots
    return slice(first, last + 1)


def _described(rope: RopeSpec) -> str:
    """Name a rotation; layers that rotate otherwise have other names."""
    digest = hashlib.blake2b(rope.inv_freq.cpu().numpy().tobytes(), digest_size=8).hexdigest()
    return f"{rope.pairing.value} {rope.rotary_dim} {digest}"
