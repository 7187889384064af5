"""How the K/V of a token lie in a row of bytes. Needs torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvgraft.errors import StoreError
from kvgraft.memory.block import KVBlock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_ALIGNMENT = 8
"""Fields of a row begin at multiples of it, so that every dtype can be viewed in place."""


@dataclass(frozen=True, slots=True)
class Field:
    """Keys or values of one layer.

    Attributes:
        num_heads: Heads with keys and values.
        head_dim: Width of each.
        dtype: Of the numbers.
    """

    num_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of a token."""
        return self.num_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True)
class RowLayout:
    """The row of a token: per layer keys, then values, from layer 0 on.

    Attributes:
        fields: Keys of layer 0, values of layer 0, keys of layer 1, ...
        rope: How keys were rotated, for readers of the file.
    """

    fields: tuple[Field, ...]
    rope: str = ""

    @classmethod
    def of(cls, block: KVBlock, rope: str = "") -> RowLayout:
        """The layout of K/V like these."""
        pairs = zip(block.keys, block.values, strict=True)
        return cls(tuple(Field(t.shape[1], t.shape[2], t.dtype) for pair in pairs for t in pair), rope)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First byte of each field in a row, and the length of the row."""
        sizes = [-(-field.num_bytes // _ALIGNMENT) * _ALIGNMENT for field in self.fields]
        return tuple(np.cumsum([0, *sizes]).tolist())

    @property
    def bytes_per_token(self) -> int:
        """Length of a row."""
        return self.offsets[-1]

    @cached_property
    def description(self) -> str:
        """The layout in words of its own, for heads and the name of the space; equal layouts have equal ones."""
        fields = [[field.num_heads, field.head_dim, str(field.dtype).removeprefix("torch.")] for field in self.fields]
        return json.dumps({"fields": fields, "rope": self.rope}, separators=(",", ":"))

    def pack(self, block: KVBlock) -> NDArray[np.uint8]:
        """Write K/V as rows `(num_tokens, bytes_per_token)`.

        Raises:
            StoreError: The block has another layout.
        """
        if RowLayout.of(block, self.rope) != self:
            raise StoreError("K/V of another layout than the store's")
        rows = np.zeros((block.num_tokens, self.bytes_per_token), np.uint8)
        whole = torch.from_numpy(rows)
        for tensor, field, offset in zip(_in_order(block), self.fields, self.offsets, strict=False):
            if field.num_bytes:
                target = whole[:, offset : offset + field.num_bytes]
                target.view(field.dtype).unflatten(1, tensor.shape[1:]).copy_(tensor)
        return rows

    def unpack(self, rows: NDArray[np.uint8]) -> KVBlock:
        """View rows as K/V; the tensors share their memory, with a row's length between tokens."""
        whole, tensors = torch.from_numpy(rows), []
        for field, offset in zip(self.fields, self.offsets, strict=False):
            part = whole[:, offset : offset + field.num_bytes].view(field.dtype)
            tensors.append(part.unflatten(1, (field.num_heads, field.head_dim)))
        return KVBlock(tuple(tensors[::2]), tuple(tensors[1::2]))


def _in_order(block: KVBlock) -> Sequence[torch.Tensor]:
    return [tensor for pair in zip(block.keys, block.values, strict=True) for tensor in pair]
