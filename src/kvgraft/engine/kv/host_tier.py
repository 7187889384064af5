"""Exact prefixes that the device has no room for live on in host memory, and come back when a prompt begins with them.

The prefix cache decides what is copied and dropped (`HierarchicalRadixCache`, `HierarchicalStateCache`), this moves the bytes
and gives device slots.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kvgraft.config import check_host_memory, quoted
from kvgraft.engine.kv.kv_space import KVSpace
from kvgraft.engine.kv.state_space import StateKVSpace
from kvgraft.errors import CapacityError, ConfigError, CorruptCacheError
from kvgraft.memory import HostSlots, HostStates, Owner
from kvgraft.prefix import EvictResult

if TYPE_CHECKING:
    from kvgraft.engine.model.slot_plan import SlotPlan
    from kvgraft.memory import BaseHostSlots, SlotArray, SlotPool, StatePool
    from kvgraft.prefix import HierarchicalRadixCache, HierarchicalStateCache, MatchResult
    from kvgraft.token_key import RadixKey

logger = logging.getLogger(__name__)

WRITE_POLICY = "write_back"
"""Copies are made when a prefix leaves the device. Made at the first hit they would cost every request a copy of its K/V,
most of which is never evicted; and a copy holds up the engine's thread whenever it is made."""


class DeviceSlots(Protocol):
    """Owner of the slots of the device."""

    def take_slots(self, num_slots: int) -> SlotArray | None:
        """Give slots to the prefix cache, with room made for them; None if there is none to make."""

    def give_slots_back(self, slots: SlotArray) -> None:
        """Take back slots that the prefix cache did not come to hold."""


class HostTier:
    """Moves K/V, or states, between a pool and host memory; a `TierTransfer`.

    Attributes:
        slots: The host's slots.
        device: Owner of the device's slots; without it nothing is loaded back.
    """

    def __init__(self, slots: BaseHostSlots) -> None:
        self.slots = slots
        self.device: DeviceSlots | None = None

    @property
    def num_held(self) -> int:
        """Host slots that are not free."""
        return self.slots.num_slots - self.slots.num_free

    def backup(self, device_slots: SlotArray) -> SlotArray | None:
        """See `TierTransfer.backup`."""
        return self.slots.store(device_slots) if len(device_slots) <= self.slots.num_free else None

    def load(self, host_slots: SlotArray) -> SlotArray | None:
        """See `TierTransfer.load`."""
        device_slots = None if self.device is None else self.device.take_slots(len(host_slots))
        if self.device is None or device_slots is None:
            return None
        try:
            self.slots.load(host_slots, device_slots)
        except BaseException:
            self.device.give_slots_back(device_slots)
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


def _too_large(num_bytes: int) -> ConfigError:
    return ConfigError(f"there is no host memory for prefix_host_bytes={quoted(num_bytes)}; lower it")


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
        self._use_tier(prefix, tier)

    def _use_tier(self, prefix: HierarchicalRadixCache | HierarchicalStateCache, tier: HostTier) -> None:
        self.num_loaded_tokens = 0
        self._num_known_failures = 0
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
        return super().num_errors + self._tiered.num_failed_transfers

    @property
    def is_doubtful(self) -> bool:
        """See `Soundness.is_doubtful`; a transfer that failed may have left host slots that neither side counts."""
        return super().is_doubtful or self._tiered.num_failed_transfers > self._num_known_failures

    def trust(self) -> None:
        """See `Soundness.trust`."""
        super().trust()
        self._num_known_failures = self._tiered.num_failed_transfers

    def rebuild(self) -> None:
        """See `KVSpace.rebuild`."""
        self._tier.slots.rebuild()
        super().rebuild()

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
        self._release_forgotten(EvictResult(loaded.freed, state_freed=loaded.state_freed))
        self.num_loaded_tokens += loaded.prefix_len - match.prefix_len
        return super().match(key)

    def check(self) -> None:
        """Verify every invariant; raises `CorruptCacheError`. For tests and idle time."""
        super().check()
        self._tier.slots.check()
        if self._tier.num_held != self._tiered.host_size:
            raise CorruptCacheError(
                f"{self._tier.num_held} host slots are held and {self._tiered.host_size} tokens of prefixes lie there"
            )

    def take_slots(self, num_slots: int) -> SlotArray | None:
        """See `DeviceSlots.take_slots`."""
        try:
            slots = self.allocate(num_slots)
        except CapacityError as error:
            logger.debug("a prefix stays on the host: %s", error)
            return None
        self.allocator.transfer(slots, Owner.REQUEST, Owner.CACHE)
        return slots

    def give_slots_back(self, slots: SlotArray) -> None:
        """See `DeviceSlots.give_slots_back`."""
        self.allocator.release(slots, Owner.CACHE)


class TieredStateKVSpace(TieredKVSpace, StateKVSpace):
    """The same for models with layers that keep states: these live on in host memory, too. Not thread-safe.

    Invariants (verified by `check`), besides those of both: a host slot of a state is free or holds one of the prefix cache.
    """

    def __init__(
        self,
        pool: SlotPool,
        states: StatePool,
        prefix: HierarchicalStateCache,
        tiers: tuple[HostTier, HostTier],
        *,
        host_bytes: int,
        donor_tokens: int,
        min_run: int,
    ) -> None:
        StateKVSpace.__init__(
            self, pool, states, prefix, host_bytes=host_bytes, donor_tokens=donor_tokens, min_run=min_run
        )
        self._use_tier(prefix, tiers[0])
        self._tiered_states = prefix
        self._state_tier = tiers[1]
        self._state_tier.device = _DeviceStates(self)

    def rebuild(self) -> None:
        """See `KVSpace.rebuild`."""
        self._state_tier.slots.rebuild()
        super().rebuild()

    @property
    def prefix_host_bytes(self) -> int:
        """Bytes of tokens and states of prefixes in host memory."""
        return super().prefix_host_bytes + self._tiered_states.host_state_size * self._state_pool.bytes_per_state

    def check(self) -> None:
        """Verify every invariant; raises `CorruptCacheError`. For tests and idle time."""
        super().check()
        self._state_tier.slots.check()
        held, counted = self._state_tier.num_held, self._tiered_states.host_state_size
        if held != counted:
            raise CorruptCacheError(f"{held} host slots of states are held and {counted} states of prefixes lie there")


class _DeviceStates:
    """Owner of the device's states; see `DeviceSlots`."""

    def __init__(self, space: StateKVSpace) -> None:
        self._space = space

    def take_slots(self, num_slots: int) -> SlotArray | None:
        """Give states while one is left for the request that asks: it goes on from a copy."""
        usage = self._space.state_usage()
        if usage.total - usage.request <= num_slots:
            return None
        try:
            taken = [self._space.take_state() for _ in range(num_slots)]
        except CapacityError as error:
            logger.debug("a state stays on the host: %s", error)
            return None
        states = np.array(taken, dtype=np.int64)
        self._space.states.transfer(states, Owner.REQUEST, Owner.CACHE)
        return states

    def give_slots_back(self, slots: SlotArray) -> None:
        """See `DeviceSlots.give_slots_back`."""
        self._space.states.release(slots, Owner.CACHE)
