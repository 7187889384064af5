"""Blocks in one piece of host memory: one allocation for all layers.

The K/V of a text are dozens of tensors of some hundred KB: one piece is taken from, and goes back to, memory that is used
again (`host_memory.py`), page-locked or not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvgraft.memory.block import KVBlock
from kvgraft.memory.host_memory import HOST_MEMORY

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvgraft.memory.host_memory import HostMemory


@dataclass(frozen=True, slots=True)
class RowShape:
    """The part that a token has of one tensor: `(num_kv_heads, head_dim)`, and its type."""

    shape: tuple[int, int]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> RowShape:
        """Return the shape of the rows of a tensor `(num_tokens, num_kv_heads, head_dim)`."""
        return cls((tensor.shape[1], tensor.shape[2]), tensor.dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of a token."""
        return self.shape[0] * self.shape[1] * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """The keys of all layers, then their values, one tensor after the other; wider types first, so that all are aligned.

    Attributes:
        keys: Per layer.
        values: Per layer.
    """

    keys: tuple[RowShape, ...]
    values: tuple[RowShape, ...]

    @classmethod
    def of(cls, block: KVBlock) -> PackedLayout:
        """Return the layout of blocks with the layers of `block`."""
        return cls(tuple(map(RowShape.of, block.keys)), tuple(map(RowShape.of, block.values)))

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token in all layers."""
        return sum(rows.num_bytes for rows in (*self.keys, *self.values))

    def view(self, memory: torch.Tensor, num_tokens: int) -> KVBlock:
        """View uint8 memory of `num_tokens * bytes_per_token` bytes, aligned to the widest type, as a block."""
        rows = (*self.keys, *self.values)
        tensors: dict[int, torch.Tensor] = {}
        offset = 0
        for index in sorted(range(len(rows)), key=lambda index: -rows[index].dtype.itemsize):
            size = num_tokens * rows[index].num_bytes
            part = memory[offset : offset + size].view(rows[index].dtype)
            tensors[index] = part.view(num_tokens, *rows[index].shape)
            offset += size
        ordered = [tensors[index] for index in range(len(rows))]
        return KVBlock(tuple(ordered[: len(self.keys)]), tuple(ordered[len(self.keys) :]))

    def empty(self, num_tokens: int, memory: HostMemory = HOST_MEMORY) -> KVBlock:
        """Return a block in a piece of `memory` of its own, to be filled before anybody else sees it."""
        return self.view(memory.take(num_tokens * self.bytes_per_token), num_tokens)


def packed(blocks: Sequence[KVBlock], memory: HostMemory = HOST_MEMORY) -> KVBlock:
    """Copy runs of the same layers, one after the other, into one block in a piece of `memory` of its own."""
    whole = PackedLayout.of(blocks[0]).empty(sum(block.num_tokens for block in blocks), memory)
    start = 0
    for block in blocks:
        part = whole.span(start, block.num_tokens)
        for target, source in zip((*part.keys, *part.values), (*block.keys, *block.values), strict=True):
            target.copy_(source)
        start += block.num_tokens
    return whole


def keeps_nothing_else(block: KVBlock) -> bool:
    """Return whether the memory that a block keeps alive is its own bytes and no more, in one piece or in several."""
    tensors = (*block.keys, *block.values)
    if not all(tensor.is_contiguous() for tensor in tensors):
        return False
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(sizes.values()) == block.num_bytes
