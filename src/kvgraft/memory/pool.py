"""The KV bytes of every slot: one key and one value tensor per layer, written, read, copied, exported and loaded.

Who holds a slot is `allocator.py`'s to know; this file trusts the slots it is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from kvgraft.errors import ConfigError
from kvgraft.memory.block import KVBlock
from kvgraft.memory.packed import packed

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

SlotIndex = slice | torch.Tensor
"""Slots as tensors are indexed by them: a slice for one ascending run, else int64 `(n,)` on the pool's device."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The shape of one token in one layer: `(num_kv_heads, head_dim)`, once for keys and once for values."""

    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.head_dim < 1:
            raise ConfigError(f"num_kv_heads and head_dim must be at least 1, not {self}")


class KVPlace(Protocol):
    """Chosen tokens of a pool, resolved once and good for every layer."""

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of `layer`, each `(n, num_kv_heads, head_dim)`, in token order."""

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values of `layer`, each `(n, num_kv_heads, head_dim)`."""


class KVPool(Protocol):
    """The part of a pool that a graft needs, be it one space of slots or two."""

    @property
    def device(self) -> torch.device:
        """Where the bytes lie."""

    def place(self, kv_indices: NDArray[np.int64], swa_indices: NDArray[np.int64] | None = None) -> KVPlace:
        """Resolve tokens by their slots; `swa_indices` are those of window layers where these have slots of their own."""


@dataclass(frozen=True, slots=True, eq=False)
class SlotPlace:
    """Chosen tokens of a `SlotPool`; see `KVPlace`."""

    pool: SlotPool
    index: SlotIndex

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of `layer`, each `(n, num_kv_heads, head_dim)`."""
        return self.pool.read(layer, self.index)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values of `layer`, each `(n, num_kv_heads, head_dim)`."""
        self.pool.write(layer, self.index, keys, values)


class SlotPool:
    """Preallocated KV of `num_slots` tokens. Starts as zeros: attention may multiply an unwritten slot by zero.

    Slots are resolved once per step by `index()`; the result is good for every layer. Not thread-safe.
    """

    def __init__(
        self, layers: Sequence[LayerShape], num_slots: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        if not layers or num_slots < 1:
            raise ConfigError(f"a pool needs layers and slots, not {len(layers)} and {num_slots}")
        self.layers = tuple(layers)
        self.num_slots = num_slots
        self.dtype = dtype
        self.device = torch.device(device)
        self._keys = tuple(self._allocate(shape) for shape in self.layers)
        self._values = tuple(self._allocate(shape) for shape in self.layers)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one slot in all layers."""
        return sum(2 * shape.num_kv_heads * shape.head_dim for shape in self.layers) * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.bytes_per_token * self.num_slots

    def keys(self, layer: int) -> torch.Tensor:
        """Keys of all slots, `(num_slots, num_kv_heads, head_dim)`, heads outermost in memory; the pool's own."""
        return self._keys[layer]

    def values(self, layer: int) -> torch.Tensor:
        """Values of all slots, `(num_slots, num_kv_heads, head_dim)`, heads outermost in memory; the pool's own."""
        return self._values[layer]

    def index(self, slots: NDArray[np.int64]) -> SlotIndex:
        """Resolve slots for the other methods, once for all layers.

        Args:
            slots: int64 `(n,)` in token order.

        Raises:
            ConfigError: A slot is not in the pool.
        """
        if len(slots) and (slots.min() < 0 or slots.max() >= self.num_slots):
            raise ConfigError(f"slots must lie in [0, {self.num_slots})")
        return as_index(slots, self.device)

    def place(self, kv_indices: NDArray[np.int64], swa_indices: NDArray[np.int64] | None = None) -> SlotPlace:
        """Resolve tokens for `read` and `write`, once for all layers; window layers have no slots of their own here.

        Raises:
            ConfigError: A slot is not in the pool.
        """
        return SlotPlace(self, self.index(kv_indices))

    def read(self, layer: int, slots: SlotIndex) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, each `(n, num_kv_heads, head_dim)`: views for a slice, gathered copies otherwise."""
        return self._keys[layer][slots], self._values[layer][slots]

    def write(self, layer: int, slots: SlotIndex, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values, each `(n, num_kv_heads, head_dim)` in the pool's dtype and on its device.

        They may be views of other slots, as `read` gives them; for slots among those of `slots`, use `copy`.

        Raises:
            ConfigError: Shape or dtype differ from what the slots hold; nothing is broadcast or cast.
        """
        shape = self.layers[layer]
        expected = (_num_indexed(slots), shape.num_kv_heads, shape.head_dim)
        for given in (keys, values):
            if given.shape != expected or given.dtype != self.dtype:
                raise ConfigError(f"expected {expected} {self.dtype}, not {tuple(given.shape)} {given.dtype}")
        _store(self._keys[layer], slots, keys)
        _store(self._values[layer], slots, values)

    def copy(self, source: SlotIndex, target: SlotIndex) -> None:
        """Copy slots in all layers, `source[i]` to `target[i]`; the two may overlap.

        Raises:
            ConfigError: They differ in length.
        """
        may_overlap = _may_overlap(source, target)
        for layer in range(len(self.layers)):
            keys, values = self.read(layer, source)
            if may_overlap:
                keys, values = keys.clone(), values.clone()
            self.write(layer, target, keys, values)

    def export(self, slots: SlotIndex) -> KVBlock:
        """Copy slots of all layers into CPU memory of their own, in one piece, the caller's."""
        pairs = [self.read(layer, slots) for layer in range(len(self.layers))]
        return packed([KVBlock(tuple(keys for keys, _ in pairs), tuple(values for _, values in pairs))])

    def load(self, block: KVBlock, slots: SlotIndex) -> None:
        """Write a block of the same layers into slots, token i to `slots[i]`.

        Raises:
            ConfigError: Layers, shape or dtype differ.
        """
        if block.num_layers != len(self.layers):
            raise ConfigError(f"a block of {block.num_layers} layers does not fit a pool of {len(self.layers)}")
        for layer, (keys, values) in enumerate(zip(block.keys, block.values, strict=True)):
            self.write(layer, slots, keys.to(self.device), values.to(self.device))

    def _allocate(self, shape: LayerShape) -> torch.Tensor:
        # Heads outermost in memory: attention reads one head's run of slots as one contiguous matrix, which is 2-10 times
        # faster on a CPU than with heads interleaved (measured for 4 heads of 32 channels).
        size = (shape.num_kv_heads, self.num_slots, shape.head_dim)
        # Filled, not `torch.zeros`: that leaves pages to be committed by the first request that writes to them.
        return torch.empty(size, dtype=self.dtype, device=self.device).fill_(0).transpose(0, 1)


def as_index(slots: NDArray[np.int64], device: torch.device | str = "cpu") -> SlotIndex:
    """Turn slots into the cheapest index: a slice if they are one ascending run, else a tensor on `device`."""
    if not len(slots):
        return slice(0, 0)
    first, last = int(slots[0]), int(slots[-1])
    if last - first == len(slots) - 1 and bool((slots[1:] - slots[:-1] == 1).all()):
        return slice(first, last + 1)
    return torch.tensor(slots, dtype=torch.int64, device=device)


def _may_overlap(source: SlotIndex, target: SlotIndex) -> bool:
    """Whether a view of `source` may change while `target` is written; a gathered source is a copy and cannot."""
    if not isinstance(source, slice):
        return False
    return not isinstance(target, slice) or max(source.start, target.start) < min(source.stop, target.stop)


def _num_indexed(slots: SlotIndex) -> int:
    return int(slots.stop - slots.start) if isinstance(slots, slice) else len(slots)


def _store(tensor: torch.Tensor, slots: SlotIndex, source: torch.Tensor) -> None:
    if isinstance(slots, slice):
        tensor[slots].copy_(source)
        return
    # Slots of one head are dense, so that torch sees that a view of others lies in the same memory, and refuses it.
    if source.shape[1] == 1 and source.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
        source = source.clone()
    tensor.index_copy_(0, slots, source)
