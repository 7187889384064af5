"""One attention layer of vLLM: its part of the paged cache, read and written token by token."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from kvgraft.errors import IntegrationError
from kvgraft.integrations.vllm.codec import KVCodec, scratch_like
from kvgraft.memory.packed import RowShape

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.v1.kv_cache_interface import AttentionSpec


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """One attention layer: forward passes read and write `module.kv_cache`; `cache` is its part of the paged cache."""

    name: str
    module: Any
    cache: Tensor
    spec: AttentionSpec
    codec: KVCodec

    @property
    def dtype(self) -> torch.dtype:
        """Type of the numbers in the cache."""
        return self.cache.dtype

    @property
    def scales(self) -> tuple[float, float]:
        """What the numbers of keys and of values are to be multiplied with."""
        return 1.0, 1.0

    @cached_property
    def rows(self) -> tuple[RowShape, RowShape]:
        """A token's keys and values, as `read` gives them."""
        keys, values = self.read(self.cache, torch.empty(0, dtype=torch.int64, device=self.cache.device))
        return RowShape.of(keys), RowShape.of(values)

    def read(self, cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Copy keys and values `(num_slots, num_kv_heads, head_dim)` out of `cache`, as stored."""
        return self.codec.read(cache, slots)

    def scratch(self, num_blocks: int) -> Tensor:
        """Allocate blocks of our own, laid out like the layer's."""
        return scratch_like(self.cache, num_blocks, self.codec.block_axis)

    def write(self, cache: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values as `read` gives them, by the engine's own operation if there is one: it is the fastest."""
        if not hasattr(self.module.impl, "do_kv_cache_update"):
            self.codec.write(cache, slots, keys, values)
            return
        engine_write(self.module, *self.stored(keys, values), cache, slots)

    def stored(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return computed keys and values as the layer would store them."""
        return keys.to(self.dtype), values.to(self.dtype)


def engine_write(module: Any, keys: Tensor, values: Tensor, cache: Tensor, slots: Tensor) -> None:  # noqa: ANN401
    """Store computed keys and values with the engine's own operation; raises `IntegrationError` if it has none."""
    update = getattr(module.impl, "do_kv_cache_update", None)
    if update is None:
        raise IntegrationError(
            f"attention backend {type(module.impl).__name__} has no separate cache update to check layouts against; "
            "nothing is grafted"
        )
    update(module, keys, values, cache, slots)
