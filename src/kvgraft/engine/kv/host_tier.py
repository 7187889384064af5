"""Exact prefixes that the device has no room for live on in host memory, and come back when a prompt begins with them.

The prefix cache decides what is copied and dropped (`HierarchicalRadixCache`, `HierarchicalStateCache`), this moves the bytes
and asks for device slots.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvgraft.config import check_host_memory, quoted
from kvgraft.errors import CapacityError, ConfigError, CorruptCacheError
from kvgraft.memory import HostSlots, HostStates, Owner
from kvgraft.prefix import HierarchicalRadixCache, HierarchicalStateCache

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvgraft.engine.model.slot_plan import SlotPlan
    from kvgraft.memory import BaseHostSlots, SlotAllocator, SlotArray, SlotPool, StatePool
    from kvgraft.prefix import PrefixCache

logger = logging.getLogger(__name__)

WRITE_POLICY = "write_back"
"""Copies are made when a prefix leaves the device. Made at the first hit they would cost every request a copy of its K/V,
most of which is never evicted; and a copy holds up the engine's thread whenever it is made."""


class HostTier:
    """Moves K/V, or states, between a pool and host memory; a `TierTransfer`. Nothing is loaded back before `serve`.

    Attributes:
        slots: The host's slots.
    """

    def __init__(self, slots: BaseHostSlots) -> None:
        self.slots = slots
        self._device: tuple[SlotAllocator, Callable[[int], SlotArray]] | None = None

    def serve(self, allocator: SlotAllocator, allocate: Callable[[int], SlotArray]) -> None:
        """Load back to slots of the device.

        Args:
            allocator: Their holders.
            allocate: Gives a request so many of them, with room made; raises `CapacityError` if there is none to make.
        """
        self._device = (allocator, allocate)

    def check(self, num_counted: int, what: str) -> None:
        """Verify that as many host slots are held as the prefix cache counts; raises `CorruptCacheError`."""
        self.slots.check()
        num_held = self.slots.num_slots - self.slots.num_free
        if num_held != num_counted:
            raise CorruptCacheError(
                f"{num_held} host slots of {what} are held and {num_counted} {what} of prefixes lie there"
            )

    def backup(self, device_slots: SlotArray) -> SlotArray | None:
        """See `TierTransfer.backup`."""
        return self.slots.store(device_slots) if len(device_slots) <= self.slots.num_free else None

    def load(self, host_slots: SlotArray) -> SlotArray | None:
        """See `TierTransfer.load`."""
        if self._device is None:
            return None
        allocator, allocate = self._device
        try:
            device_slots = allocate(len(host_slots))
        except CapacityError as error:
            logger.debug("a prefix stays on the host: %s", error)
            return None
        try:
            self.slots.load(host_slots, device_slots)
            allocator.transfer(device_slots, Owner.REQUEST, Owner.CACHE)
        except BaseException:
            allocator.release(device_slots, Owner.REQUEST)
            raise
        return device_slots

    def free_host(self, host_slots: SlotArray) -> None:
        """See `TierTransfer.free_host`."""
        self.slots.free(host_slots)


def token_tier(pool: SlotPool, num_bytes: int) -> HostTier:
    """Reserve `num_bytes` of host memory for K/V.

    Raises:
        ConfigError: They hold no token, or exceed the machine's memory.
    """
    check_host_memory("prefix_host_bytes", num_bytes)
    if num_bytes < pool.bytes_per_token:
        raise ConfigError(
            f"prefix_host_bytes={quoted(num_bytes)} hold no token of {pool.bytes_per_token} bytes; "
            "raise prefix_host_bytes, or set it to 0"
        )
    try:
        return HostTier(HostSlots(pool, num_bytes // pool.bytes_per_token))
    except (MemoryError, RuntimeError) as error:
        raise _too_large(num_bytes) from error


def state_tiers(pool: SlotPool, states: StatePool, plan: SlotPlan, num_bytes: int) -> tuple[HostTier, HostTier]:
    """Reserve host memory for K/V and for states, as many as `plan` says, which take `num_bytes`.

    Raises:
        ConfigError: They exceed the machine's memory.
    """
    check_host_memory("prefix_host_bytes", num_bytes)
    try:
        return HostTier(HostSlots(pool, plan.num_slots)), HostTier(HostStates(states, plan.num_states))
    except (MemoryError, RuntimeError) as error:
        raise _too_large(num_bytes) from error


def tiers_of(prefix: PrefixCache) -> tuple[HostTier | None, HostTier | None]:
    """Return the tiers that a prefix cache was made with, of K/V and of states; None where it has none of ours."""
    if isinstance(prefix, HierarchicalStateCache):
        if isinstance(prefix.transfer, HostTier) and isinstance(prefix.state_transfer, HostTier):
            return prefix.transfer, prefix.state_transfer
    elif isinstance(prefix, HierarchicalRadixCache) and isinstance(prefix.transfer, HostTier):
        return prefix.transfer, None
    return None, None


def _too_large(num_bytes: int) -> ConfigError:
    return ConfigError(f"there is no host memory for prefix_host_bytes={quoted(num_bytes)}; lower it")
