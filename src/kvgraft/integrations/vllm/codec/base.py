"""The interface of codecs, and their base where tokens can be viewed in the cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def is_float8(dtype: torch.dtype) -> bool:
    """Return whether numbers of this type have 8 bits."""
    return dtype.is_floating_point and dtype.itemsize == 1


class KVCodec(Protocol):
    """Reads and writes tokens of one layer's cache. A slot is `block_id * block_size + offset`."""

    name: str
    block_axis: int

    def matches(self, cache: Tensor, num_kv_heads: int, head_dim: int, block_size: int) -> bool:
        """Return whether the tensor has the shape of this layout; the self-check decides whether it is this layout."""

    def read(self, cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Copy keys and values, each `(num_slots, num_kv_heads, head_dim)`, of int64 `slots`."""

    def write(self, cache: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values, shaped as `read` returns them."""


class ViewCodec(ABC):
    """The part of a `KVCodec` that follows from two views of the cache; O(num_slots * heads * dim)."""

    @abstractmethod
    def views(self, cache: Tensor) -> tuple[Tensor, Tensor]:
        """View keys and values as `(blocks, block, heads, dim)`."""

    def read(self, cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """See `KVCodec`."""
        keys, values = self.views(cache)
        at = slots // keys.shape[1], slots % keys.shape[1]
        return keys[at], values[at]

    def write(self, cache: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """See `KVCodec`."""
        key_cache, value_cache = self.views(cache)
        at = slots // key_cache.shape[1], slots % key_cache.shape[1]
        key_cache[at] = keys.to(cache.dtype)
        value_cache[at] = values.to(cache.dtype)
