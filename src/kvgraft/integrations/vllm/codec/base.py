"""The interface of codecs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class KVCodec(Protocol):
    """Reads and writes tokens of one layer's cache. A slot is `block_id * block_size + offset`."""

    name: str
    block_axis: int

    def matches(self, cache: Tensor, num_kv_heads: int, head_dim: int, block_size: int) -> bool:
        """Whether the tensor has the shape of this layout; the self-check decides whether it is this layout."""

    def read(self, cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Copy keys and values, each `(num_slots, num_kv_heads, head_dim)`, of int64 `slots`."""

    def write(self, cache: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values, shaped as `read` returns them."""
