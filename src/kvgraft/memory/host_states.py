"""States that leave a `StatePool` for host memory and may come back to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.errors import ConfigError
from kvgraft.memory.host_slots import BaseHostSlots
from kvgraft.memory.state_pool import StatePool

if TYPE_CHECKING:
    from kvgraft.memory.extents import SlotArray


class HostStates(BaseHostSlots):
    """States of sequences beside a pool of them."""

    def __init__(self, pool: StatePool, num_slots: int) -> None:
        """Reserve the memory; page-locked where the pool is on a GPU.

        Args:
            pool: Where states come from and go to.
            num_slots: States that fit.

        Raises:
            ConfigError: There is not one slot.
        """
        super().__init__(num_slots)
        self._pool = pool
        self._states = StatePool(pool.parts, num_slots, pin_memory=pool.device.type == "cuda")

    def _copy_out(self, device_slots: SlotArray, host_slots: SlotArray) -> None:
        for source, target in zip(device_slots.tolist(), host_slots.tolist(), strict=True):
            self._states.copy_from(self._pool, source, target)

    def _copy_in(self, host_slots: SlotArray, device_slots: SlotArray) -> None:
        if len(host_slots) != len(device_slots):
            raise ConfigError(f"{len(host_slots)} states for {len(device_slots)} slots; give one slot for each")
        for source, target in zip(host_slots.tolist(), device_slots.tolist(), strict=True):
            self._pool.copy_from(self._states, source, target)
