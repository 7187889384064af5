"""The KV of some tokens outside a pool: what stores keep and pools export and load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, eq=False)
class KVBlock:
    """Keys and values of a run of tokens, per layer. The tensors are not written once the block exists.

    Attributes:
        keys: One tensor `(num_tokens, num_kv_heads, head_dim)` per layer; heads and widths may differ by layer.
        values: Likewise.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]

    def __post_init__(self) -> None:
        tensors = (*self.keys, *self.values)
        if not self.keys or len(self.keys) != len(self.values):
            raise ConfigError(f"a block needs keys and values per layer, not {len(self.keys)} and {len(self.values)}")
        if any(tensor.ndim != 3 or len(tensor) != len(self.keys[0]) for tensor in tensors):
            raise ConfigError("tensors of a block must be (num_tokens, num_kv_heads, head_dim) of equal num_tokens")

    @property
    def num_layers(self) -> int:
        """Layers with keys and values."""
        return len(self.keys)

    @property
    def num_tokens(self) -> int:
        """Tokens in every layer."""
        return len(self.keys[0])

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def span(self, start: int, length: int) -> KVBlock:
        """View `length` tokens from `start`; shares memory.

        Raises:
            ConfigError: The block has fewer tokens.
        """
        if start < 0 or length < 0 or start + length > self.num_tokens:
            raise ConfigError(f"tokens [{start}, {start + length}) of a block of {self.num_tokens}")
        window = slice(start, start + length)
        return KVBlock(tuple(k[window] for k in self.keys), tuple(v[window] for v in self.values))

    @classmethod
    def join(cls, blocks: Sequence[KVBlock]) -> KVBlock:
        """Concatenate runs of the same layers; a single one is returned as it is, others are copied.

        Raises:
            ConfigError: There are none, or they differ in layers.
        """
        if not blocks or len({block.num_layers for block in blocks}) != 1:
            raise ConfigError("blocks to be joined must have the same layers")
        if len(blocks) == 1:
            return blocks[0]
        keys = zip(*(block.keys for block in blocks), strict=True)
        values = zip(*(block.values for block in blocks), strict=True)
        return cls(tuple(map(torch.cat, keys)), tuple(map(torch.cat, values)))
