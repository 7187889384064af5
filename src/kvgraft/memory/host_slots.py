"""Numbered slots in host memory, for K/V that leave a `SlotPool` and may come back to it. Evicts nothing by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from kvgraft.errors import CapacityError, ConfigError, CorruptCacheError
from kvgraft.memory.extents import FreeExtents, SlotArray
from kvgraft.memory.pool import SlotPool, as_index

if TYPE_CHECKING:
    from kvgraft.memory.pool import LayerShape


class HostSlots:
    """K/V of `num_slots` tokens beside a pool, slot for slot, bit for bit. Not thread-safe.

    Tokens lie outermost, other than in the pool: a run of slots is one piece of memory, which a GPU reads and writes in one
    transfer. Copies are done when the call returns.

    Invariant (verified by `check`): a slot is free or was given out once; `num_free` counts the free ones.
    """

    def __init__(self, pool: SlotPool, num_slots: int) -> None:
        """Reserve the memory; page-locked where the pool is on a GPU, else committed as it is written.

        Args:
            pool: Where K/V come from and go to.
            num_slots: Tokens that fit.

        Raises:
            ConfigError: There is not one slot.
        """
        if num_slots < 1:
            raise ConfigError(f"host memory for K/V needs at least one slot, not {num_slots}")
        self.num_slots = num_slots
        self._pool = pool
        self._keys = tuple(self._allocate(shape) for shape in pool.layers)
        self._values = tuple(self._allocate(shape) for shape in pool.layers)
        self._extents = FreeExtents(num_slots)
        self._is_free = np.ones(num_slots, dtype=np.bool_)
        self._num_free = num_slots

    @property
    def num_free(self) -> int:
        """Slots that `store` can still give."""
        return self._num_free

    def store(self, kv_indices: SlotArray) -> SlotArray:
        """Copy slots of the pool to host slots and return these, one for each.

        Raises:
            CapacityError: Fewer are free. Nothing has changed.
        """
        if len(kv_indices) > self._num_free:
            raise CapacityError(f"{len(kv_indices)} host slots asked for, {self._num_free} free")
        host_indices = self._extents.take(len(kv_indices))
        self._is_free[host_indices] = False
        self._num_free -= len(host_indices)
        try:
            self._copy_out(kv_indices, host_indices)
        except BaseException:
            self.free(host_indices)
            raise
        return host_indices

    def load(self, host_indices: SlotArray, kv_indices: SlotArray) -> None:
        """Copy host slots to slots of the pool, one for each; they stay where they are, too.

        Raises:
            CorruptCacheError: One of them is free.
            ConfigError: There is not one slot of the pool for each.
        """
        self._require_held(host_indices)
        source, target = as_index(host_indices), self._pool.index(kv_indices)
        device = self._pool.device
        for layer, (keys, values) in enumerate(zip(self._keys, self._values, strict=True)):
            self._pool.write(layer, target, keys[source].to(device), values[source].to(device))

    def free(self, host_indices: SlotArray) -> None:
        """Take slots back.

        Raises:
            CorruptCacheError: One of them is free already, or given twice.
        """
        self._require_held(host_indices)
        self._is_free[host_indices] = True
        self._num_free += len(host_indices)
        self._extents.give_back(host_indices)

    def check(self) -> None:
        """Verify the invariant; for tests and idle time.

        Raises:
            CorruptCacheError: It does not hold.
        """
        self._extents.check()
        if not np.array_equal(np.flatnonzero(self._is_free), self._extents.slots()):
            raise CorruptCacheError(
                "the free extents of host slots are not those that were never given out or came back"
            )
        if self._num_free != int(self._is_free.sum()):
            raise CorruptCacheError(f"{int(self._is_free.sum())} host slots are free, counted as {self._num_free}")

    def _copy_out(self, kv_indices: SlotArray, host_indices: SlotArray) -> None:
        source, target = self._pool.index(kv_indices), as_index(host_indices)
        for layer, (keys, values) in enumerate(zip(self._keys, self._values, strict=True)):
            pool_keys, pool_values = self._pool.read(layer, source)
            _store(keys, target, pool_keys)
            _store(values, target, pool_values)

    def _require_held(self, host_indices: SlotArray) -> None:
        if len(np.unique(host_indices)) != len(host_indices) or self._is_free[host_indices].any():
            raise CorruptCacheError("a host slot is free, or named twice in one call")

    def _allocate(self, shape: LayerShape) -> torch.Tensor:
        size = (self.num_slots, shape.num_kv_heads, shape.head_dim)
        return torch.empty(size, dtype=self._pool.dtype, pin_memory=self._pool.device.type == "cuda")


def _store(tensor: torch.Tensor, target: slice | torch.Tensor, source: torch.Tensor) -> None:
    """Write rows in host memory; heads are moved after tokens on the device first, so that one piece is transferred."""
    if isinstance(target, slice):
        tensor[target].copy_(source.contiguous())
    else:
        tensor.index_copy_(0, target, source.contiguous().to(tensor.device))
