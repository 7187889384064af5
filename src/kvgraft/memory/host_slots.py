"""Numbered slots in host memory, for what leaves a pool and may come back to it. They evict nothing by themselves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvgraft.errors import CapacityError, ConfigError, CorruptCacheError
from kvgraft.memory.extents import FreeExtents, SlotArray
from kvgraft.memory.pool import SlotPool, as_index

if TYPE_CHECKING:
    from kvgraft.memory.pool import LayerShape


class BaseHostSlots(ABC):
    """Slots beside a pool, copied slot for slot and bit for bit. Not thread-safe. Copies are done when a call returns.

    Invariant (verified by `check`): a slot is free or was given out once; `num_free` counts the free ones.
    """

    def __init__(self, num_slots: int) -> None:
        """Begin with all slots free; a subclass reserves their memory.

        Raises:
            ConfigError: There is not one slot.
        """
        if num_slots < 1:
            raise ConfigError(f"host memory for prefixes needs at least one slot, not {num_slots}")
        self.num_slots = num_slots
        self._is_free = np.ones(num_slots, dtype=np.bool_)
        self.rebuild()

    def rebuild(self) -> None:
        """Free all slots without a look at the counts, which may be wrong; what holders still name is not theirs any more."""
        self._extents = FreeExtents(self.num_slots)
        self._is_free.fill(True)
        self._num_free = self.num_slots

    @property
    def num_free(self) -> int:
        """Slots that `store` can still give."""
        return self._num_free

    def store(self, device_slots: SlotArray) -> SlotArray:
        """Copy slots of the pool to host slots and return these, one for each.

        Raises:
            CapacityError: Fewer are free. Nothing has changed.
        """
        if len(device_slots) > self._num_free:
            raise CapacityError(f"{len(device_slots)} host slots asked for, {self._num_free} free")
        host_slots = self._extents.take(len(device_slots))
        self._is_free[host_slots] = False
        self._num_free -= len(host_slots)
        try:
            self._copy_out(device_slots, host_slots)
        except BaseException:
            self.free(host_slots)
            raise
        return host_slots

    def load(self, host_slots: SlotArray, device_slots: SlotArray) -> None:
        """Copy host slots to slots of the pool, one for each; they stay where they are, too.

        Raises:
            CorruptCacheError: One of them is free.
            ConfigError: There is not one slot of the pool for each.
        """
        self._require_held(host_slots)
        self._copy_in(host_slots, device_slots)

    @abstractmethod
    def _copy_out(self, device_slots: SlotArray, host_slots: SlotArray) -> None:
        """Copy slots of the pool to host slots."""

    @abstractmethod
    def _copy_in(self, host_slots: SlotArray, device_slots: SlotArray) -> None:
        """Copy host slots to slots of the pool."""

    def free(self, host_slots: SlotArray) -> None:
        """Take slots back.

        Raises:
            CorruptCacheError: One of them is free already, or given twice.
        """
        self._require_held(host_slots)
        self._is_free[host_slots] = True
        self._num_free += len(host_slots)
        self._extents.give_back(host_slots)

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

    def _require_held(self, host_slots: SlotArray) -> None:
        if len(np.unique(host_slots)) != len(host_slots) or self._is_free[host_slots].any():
            raise CorruptCacheError("a host slot is free, or named twice in one call")


class HostSlots(BaseHostSlots):
    """K/V of `num_slots` tokens beside a pool.

    Tokens lie outermost, other than in the pool: a run of slots is one piece of memory, which a GPU reads and writes in one
    transfer.
    """

    def __init__(self, pool: SlotPool, num_slots: int) -> None:
        """Reserve the memory; page-locked where the pool is on a GPU, else committed as it is written.

        Args:
            pool: Where K/V come from and go to.
            num_slots: Tokens that fit.

        Raises:
            ConfigError: There is not one slot.
        """
        super().__init__(num_slots)
        self._pool = pool
        self._keys = tuple(self._allocate(shape) for shape in pool.layers)
        self._values = tuple(self._allocate(shape) for shape in pool.layers)

    def _copy_out(self, device_slots: SlotArray, host_slots: SlotArray) -> None:
        source, target = self._pool.index(device_slots), as_index(host_slots)
        for layer, (keys, values) in enumerate(zip(self._keys, self._values, strict=True)):
            pool_keys, pool_values = self._pool.read(layer, source)
            _store(keys, target, pool_keys)
            _store(values, target, pool_values)

    def _copy_in(self, host_slots: SlotArray, device_slots: SlotArray) -> None:
        source, target = as_index(host_slots), self._pool.index(device_slots)
        device = self._pool.device
        for layer, (keys, values) in enumerate(zip(self._keys, self._values, strict=True)):
            self._pool.write(layer, target, keys[source].to(device), values[source].to(device))

    def _allocate(self, shape: LayerShape) -> torch.Tensor:
        size = (self.num_slots, shape.num_kv_heads, shape.head_dim)
        return torch.empty(size, dtype=self._pool.dtype, pin_memory=self._pool.device.type == "cuda")


def _store(tensor: torch.Tensor, target: slice | torch.Tensor, source: torch.Tensor) -> None:
    """Write rows in host memory; heads are moved after tokens on the device first, so that one piece is transferred."""
    if isinstance(target, slice):
        tensor[target].copy_(source.contiguous())
    else:
        tensor.index_copy_(0, target, source.contiguous().to(tensor.device))
