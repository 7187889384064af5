"""The KV bytes of a model with window layers: slots for its full-attention layers, and fewer for its window layers.

A token has a number in each of the two spaces. Its full slot lives as long as the token; its window slot only while a row
can still see it, so the two spaces are handed out and freed independently of one another. Who holds which slot, and which
window slot belongs to a position, is not known here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvgraft.errors import ConfigError
from kvgraft.memory.block import KVBlock
from kvgraft.memory.pool import LayerShape, SlotIndex, SlotPool
from kvgraft.windows import widest

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvgraft.windows import WindowKind


@dataclass(frozen=True, slots=True, eq=False)
class HybridPlace:
    """Chosen tokens of a `HybridSlotPool`, resolved once for all layers; see `KVPlace`."""

    pool: HybridSlotPool
    full_index: SlotIndex
    window_index: SlotIndex

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of `layer`, each `(n, num_kv_heads, head_dim)`."""
        pool, number = self.pool.pool_of(layer)
        return pool.read(number, self.window_index if pool is self.pool.window else self.full_index)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values of `layer`, each `(n, num_kv_heads, head_dim)`."""
        pool, number = self.pool.pool_of(layer)
        pool.write(number, self.window_index if pool is self.pool.window else self.full_index, keys, values)


class HybridSlotPool:
    """Preallocated KV in two spaces of slots, one per kind of attention layer. Not thread-safe.

    Attributes:
        layers: K/V heads and head size of every layer of the model.
        window_kind: Which keys a row of a window layer sees; of several sliding windows the widest.
        num_slots: Slots of the full-attention space, one for every token. A model without full-attention layers has them
            as mere numbers.
        full: Pool of the full-attention layers; None if there are none.
        window: Pool of the window layers.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        windows: Sequence[WindowKind | None],
        *,
        num_slots: int,
        num_window_slots: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate both spaces.

        Args:
            layers: One shape per layer.
            windows: Per layer which keys a row sees; None for full attention.
            num_slots: Slots of the full-attention space.
            num_window_slots: Slots of the window space.
            dtype: Of keys and values.
            device: Of both pools.

        Raises:
            ConfigError: No layer has a window, they do not go together, or there are no slots.
        """
        kind = widest(windows)
        if kind is None or len(windows) != len(layers) or num_slots < 1:
            raise ConfigError("a hybrid pool needs slots, and layers of which at least one has a window")
        self.layers = tuple(layers)
        self.window_kind = kind
        self.num_slots = num_slots
        self.dtype = dtype
        self.device = torch.device(device)
        self._is_window = tuple(window is not None for window in windows)
        full_layers = self._shapes(is_window=False)
        self.full = SlotPool(full_layers, num_slots, dtype, device) if full_layers else None
        self.window = SlotPool(self._shapes(is_window=True), num_window_slots, dtype, device)
        numbers = [sum(kind == own for kind in self._is_window[:layer]) for layer, own in enumerate(self._is_window)]
        self._places = tuple(
            (self.window if own or self.full is None else self.full, number)
            for own, number in zip(self._is_window, numbers, strict=True)
        )

    @property
    def num_window_slots(self) -> int:
        """Slots of the window space."""
        return self.window.num_slots

    @property
    def full_bytes_per_token(self) -> int:
        """Bytes of one slot of the full-attention space."""
        return 0 if self.full is None else self.full.bytes_per_token

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers while it has both slots."""
        return self.full_bytes_per_token + self.window.bytes_per_token

    @property
    def num_bytes(self) -> int:
        """Bytes of both pools."""
        return self.window.num_bytes + (0 if self.full is None else self.full.num_bytes)

    def pool_of(self, layer: int) -> tuple[SlotPool, int]:
        """The pool that holds a layer of the model, and the layer's number in it."""
        return self._places[layer]

    def place(self, kv_indices: NDArray[np.int64], swa_indices: NDArray[np.int64] | None = None) -> HybridPlace:
        """Resolve tokens, once for all layers.

        Args:
            kv_indices: int64 `(n,)` full slots in token order.
            swa_indices: int64 `(n,)` window slots of the same tokens.

        Raises:
            ConfigError: A slot is not in its pool; a window slot that was given back (-1) never is.
        """
        if swa_indices is None or len(swa_indices) != len(kv_indices):
            raise ConfigError("a hybrid pool needs the window slots of the same tokens, too")
        full_index = slice(0, 0) if self.full is None else self.full.index(kv_indices)
        return HybridPlace(self, full_index, self.window.index(swa_indices))

    def export(self, kv_indices: NDArray[np.int64], windows: KVBlock) -> KVBlock:
        """Copy the full-attention layers of `kv_indices` to the CPU and join them with those of `windows`, in layer order.

        Args:
            kv_indices: int64 `(n,)` full slots.
            windows: Window layers of the same tokens, as `export_windows` gave them; shared, not copied.
        """
        if self.full is None:
            return windows
        full = self.full.export(self.full.index(kv_indices))
        blocks = [windows if pool is self.window else full for pool, _ in self._places]
        pairs = [(block.keys[n], block.values[n]) for block, (_, n) in zip(blocks, self._places, strict=True)]
        return KVBlock(tuple(keys for keys, _ in pairs), tuple(values for _, values in pairs))

    def export_windows(self, swa_indices: NDArray[np.int64]) -> KVBlock:
        """Copy the window layers of `swa_indices` into CPU memory of their own, the caller's."""
        return self.window.export(self.window.index(swa_indices))

    def _shapes(self, *, is_window: bool) -> list[LayerShape]:
        return [shape for shape, kind in zip(self.layers, self._is_window, strict=True) if kind == is_window]
