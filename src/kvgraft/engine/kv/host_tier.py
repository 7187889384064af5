"""Exact prefixes that the device has no room for live on in host memory, and come back when a prompt begins with them.

The prefix cache decides what is copied and dropped (`HierarchicalRadixCache`), this moves the bytes and gives device slots.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from kvgraft.config import check_host_memory, quoted
from kvgraft.engine.kv.kv_space import KVSpace
from kvgraft.errors import CapacityError, ConfigError, CorruptCacheError
from kvgraft.memory import HostSlots, Owner

if TYPE_CHECKING:
    from kvgraft.memory import SlotArray, SlotPool
    from kvgraft.prefix import HierarchicalRadixCache, MatchResult, RadixKey

logger = logging.getLogger(__name__)

WRITE_POLICY = "write_back"
"""Copies are made when a prefix leaves the device. Made at the first hit they would cost every request a copy of its K/V,
most of which is never evicted; and a copy holds up the engine's thread whenever it is made."""


class DeviceSlots(Protocol):
    """Owner of the slots of the device."""

    def take_slots(self, num_tokens: int) -> SlotArray | None:
        """Give slots to the prefix cache, with room made for them; None if there is none to make."""

    def give_slots_back(self, kv_indices: SlotArray) -> None:
        """Take back slots that the prefix cache did not come to hold."""


class HostTier:
    """Moves K/V between a pool and host memory; a `TierTransfer`.

    Attributes:
        slots: The host's slots.
        device: Owner of the device's slots; without it nothing is loaded back.
    """

    def __init__(self, pool: SlotPool, num_bytes: int) -> None:
        """Reserve `num_bytes` of host memory.

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
            self.slots = HostSlots(pool, num_bytes // pool.bytes_per_token)
        except (MemoryError, RuntimeError) as error:
            raise ConfigError(f"there is no host memory for prefix_host_bytes={quoted(num_bytes)}; lower it") from error
        self.device: DeviceSlots | None = None

    def backup(self, kv_indices: SlotArray) -> SlotArray | None:
        """See `TierTransfer.backup`."""
        return self.slots.store(kv_indices) if len(kv_indices) <= self.slots.num_free else None

    def load(self, host_indices: SlotArray) -> SlotArray | None:
        """See `TierTransfer.load`."""
        kv_indices = None if self.device is None else self.device.take_slots(len(host_indices))
        if self.device is None or kv_indices is None:
            return None
        try:
            self.slots.load(host_indices, kv_indices)
        except BaseException:
            self.device.give_slots_back(kv_indices)
            raise
        return kv_indices

    def free_host(self, host_indices: SlotArray) -> None:
        """See `TierTransfer.free_host`."""
        self.slots.free(host_indices)


class TieredKVSpace(KVSpace):
    """A `KVSpace` that evicts prefixes to host memory and loads them back on a match. Not thread-safe.

    Invariants (verified by `check`), besides those of `KVSpace`: a host slot is free or holds a token of the prefix cache.
    """

    def __init__(
        self,
        pool: SlotPool,
        prefix: HierarchicalRadixCache,
        tier: HostTier,
        *,
        host_bytes: int,
        donor_tokens: int,
        min_run: int,
    ) -> None:
        super().__init__(pool, prefix, host_bytes=host_bytes, donor_tokens=donor_tokens, min_run=min_run)
        self.num_loaded_tokens = 0
        self._tiered = prefix
        self._tier = tier
        tier.device = self

    @property
    def prefix_host_tokens(self) -> int:
        """Tokens of prefixes with a copy in host memory."""
        return self._tiered.host_size

    @property
    def num_errors(self) -> int:
        """Transfers that failed and became misses."""
        return self._tiered.num_failed_transfers

    def match(self, key: RadixKey) -> MatchResult:
        """Find the longest stored prefix of `key`, and bring what lies on the host to the device first.

        Where that fails the match is the part on the device. A request without room for its prefix has none for its
        prompt either, so nothing is gained by bringing back a part.
        """
        match = super().match(key)
        # The part on the device stays, so its slots are no room: without this a hopeless load would evict all the others.
        if not 0 < match.host_hit_len <= self.available - match.prefix_len:
            return match
        loaded = self._tiered.load_back(match)
        if len(loaded.freed):
            self.allocator.release(loaded.freed, Owner.CACHE)
        self.num_loaded_tokens += loaded.prefix_len - match.prefix_len
        return super().match(key)

    def check(self) -> None:
        """Verify every invariant; raises `CorruptCacheError`. For tests and idle time."""
        super().check()
        self._tier.slots.check()
        held = self._tier.slots.num_slots - self._tier.slots.num_free
        if held != self._tiered.host_size:
            raise CorruptCacheError(
                f"{held} host slots are held and {self._tiered.host_size} tokens of prefixes lie there"
            )

    def take_slots(self, num_tokens: int) -> SlotArray | None:
        """See `DeviceSlots.take_slots`."""
        try:
            slots = self.allocate(num_tokens)
        except CapacityError as error:
            logger.debug("a prefix stays on the host: %s", error)
            return None
        self.allocator.transfer(slots, Owner.REQUEST, Owner.CACHE)
        return slots

    def give_slots_back(self, kv_indices: SlotArray) -> None:
        """See `DeviceSlots.give_slots_back`."""
        self.allocator.release(kv_indices, Owner.CACHE)
