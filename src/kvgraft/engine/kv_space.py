"""All K/V of an engine: slots on the device, exact prefixes, donors on device and host, and how room is made.

Who may hold a slot: running requests, the prefix cache and donors; the allocator counts references of each. When slots run
out, least recently used prefixes go first, then the least valuable donors move to host memory, then they are dropped.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.donors import Donor, DonorCatalogue
from kvgraft.errors import CapacityError, CorruptCacheError
from kvgraft.graft.executor import BlockSource
from kvgraft.memory import Owner, SlotAllocator, SlotPool, create_store

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvgraft.engine.window_row import WindowRow
    from kvgraft.graft.executor import KVSource
    from kvgraft.memory import HybridSlotPool, KVBlock, SlotUsage, StoreKey
    from kvgraft.prefix import EvictResult, MatchResult, PrefixCache, PrefixHandle, RadixKey
    from kvgraft.types import DonorId, Match, Namespace, TokenArray

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class SlotKV:
    """K/V of a donor that lie in slots of the pool, one per token."""

    slots: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class HostKV:
    """K/V of a donor that lie in the host store under its id."""


@dataclass(frozen=True, slots=True, eq=False)
class PrefixLock:
    """A lock on a stored prefix.

    Attributes:
        receipt: What the prefix cache gave for it.
        epoch: How often everything had been forgotten by then; a lock of an earlier epoch holds nothing any more.
    """

    receipt: PrefixHandle
    epoch: int


class KVSpace:
    """Owns allocator, prefix cache, donor catalogue and host store over one pool. Not thread-safe.

    Invariants (verified by `check`):
        - `free + cached + donor + request == total` slots.
        - The prefix cache's slots are exactly those with a CACHE reference; donors' slots those with a DONOR reference.
        - A donor's K/V lie in slots or in the host store, and the host store holds nothing else.
    """

    def __init__(
        self,
        pool: SlotPool | HybridSlotPool,
        prefix: PrefixCache,
        *,
        store: str,
        host_bytes: int,
        donor_tokens: int,
        min_run: int,
    ) -> None:
        self.pool = pool
        self.allocator = SlotAllocator(pool.num_slots)
        self.prefix = prefix
        self.donors = DonorCatalogue(donor_tokens, min_run=min_run)
        self.host = create_store(store, budget_bytes=host_bytes, pin_memory=pool.device.type == "cuda")
        self.num_spilled = 0
        self.num_dropped = 0
        self._epoch = 0

    @property
    def epoch(self) -> int:
        """How often everything has been forgotten: K/V that a request began to compute in an earlier epoch are not kept."""
        return self._epoch

    def usage(self) -> SlotUsage:
        """Count slots that are free, or held by requests, prefixes and donors."""
        return self.allocator.usage()

    def window_usage(self) -> SlotUsage | None:
        """Slots of window layers by holder, where these have slots of their own."""
        return None

    @property
    def held_bytes(self) -> int:
        """Bytes of K/V on the device that somebody holds: requests, the prefix cache or donors."""
        usage = self.usage()
        return (usage.total - usage.free) * self.pool.bytes_per_token

    @property
    def available(self) -> int:
        """Slots that no running request holds: free ones, and what eviction can free if no donor is pinned."""
        usage = self.usage()
        return usage.total - usage.request

    def allocate(self, num_tokens: int, *, after: int | None = None) -> NDArray[np.int64]:
        """Give a request `num_tokens` slots, making room where needed.

        Raises:
            CapacityError: There is no room to make. Nothing is evicted in vain unless pinned donors are in the way.
        """
        if num_tokens > self.available:
            raise self._shortage(num_tokens)
        if num_tokens > self.allocator.free_size:
            self._make_room(num_tokens)
        return self.allocator.allocate(num_tokens, after=after)

    def source(self, donor: Donor, match: Match) -> KVSource:
        """K/V of the matched part of `donor`, from whichever tier holds them."""
        start, stop = match.donor_start, match.donor_start + match.length
        if isinstance(donor.kv, SlotKV):
            return self.pool.place(donor.kv.slots[start:stop])
        return BlockSource(self.host.get(donor.donor_id, start, match.length), self.pool.device)

    def match(self, key: RadixKey) -> MatchResult:
        """Find the longest stored prefix of `key`; lock it before anything may evict."""
        return self.prefix.match_prefix(key)

    def store_prefix(self, key: RadixKey, slots: NDArray[np.int64], windows: WindowRow | None) -> None:
        """Give the prefix cache the exact K/V of `key`; the request goes on holding its slots, too.

        Args:
            key: Tokens and namespace.
            slots: Slot of each.
            windows: The request's window slots; None where all layers share one space.
        """
        result = self.prefix.insert(key, slots)
        self.allocator.retain(slots[result.prefix_len : result.total_len], Owner.CACHE)

    def lock(self, handle: PrefixHandle) -> PrefixLock:
        """Keep the prefix of `handle` from eviction until `unlock`."""
        return PrefixLock(self.prefix.inc_lock_ref(handle), self._epoch)

    def unlock(self, lock: PrefixLock) -> None:
        """Give back a lock on a prefix, which may have been forgotten since."""
        if lock.epoch == self._epoch:
            self._release_forgotten(self.prefix.dec_lock_ref(lock.receipt))

    def add_donor(
        self,
        namespace: Namespace,
        token_ids: TokenArray,
        slots: NDArray[np.int64],
        *,
        generation: int,
        start_position: int,
    ) -> DonorId | None:
        """Register text whose K/V lie in `slots` as a donor; None if it is too short or the catalogue cannot take it."""
        try:
            result = self.donors.add(
                namespace,
                token_ids,
                SlotKV(slots),
                generation=generation,
                start_position=start_position,
            )
        except CapacityError as error:
            logger.debug("text does not become a donor: %s", error)
            return None
        for evicted in result.evicted:
            self._forget_kv(evicted)
        if result.donor is None:
            return None
        self.allocator.retain(slots, Owner.DONOR)
        return result.donor.donor_id

    def remove_donor(self, donor_id: DonorId) -> None:
        """Forget a donor and its K/V."""
        self._forget_kv(self.donors.remove(donor_id))

    def reset(self) -> None:
        """Forget all prefixes and donors; running requests keep their slots."""
        self._epoch += 1
        cached = self.prefix.reset()
        if len(cached):
            self.allocator.release(cached, Owner.CACHE)
        for donor in self.donors.reset():
            self._forget_kv(donor)

    def _make_room(self, num_tokens: int) -> None:
        while (shortage := num_tokens - self.allocator.free_size) > 0:
            evicted = self.prefix.evict(shortage)
            self._release_forgotten(evicted)
            if self.allocator.free_size >= num_tokens:
                return
            if not self._spill_donor() and not len(evicted.freed):
                raise self._shortage(num_tokens)

    def _release_forgotten(self, result: EvictResult) -> None:
        """Take back slots that the prefix cache has forgotten."""
        if len(result.freed):
            self.allocator.release(result.freed, Owner.CACHE)

    def _shortage(self, num_tokens: int) -> CapacityError:
        return CapacityError(
            f"{num_tokens} KV slots are needed and {self.available} of {self.allocator.num_slots} are not in use by running "
            "requests; shorten the prompt or raise num_slots"
        )

    def _spill_donor(self) -> bool:
        """Move the least valuable donor that holds slots to the host, or drop it; False if there is none."""
        donor = next((d for d in self.donors.victims() if isinstance(d.kv, SlotKV)), None)
        if donor is None:
            return False
        assert isinstance(donor.kv, SlotKV)
        assert isinstance(self.pool, SlotPool), "donors of a hybrid model lie on the host"
        has_room = self.make_host_room(len(donor.kv.slots) * self.pool.bytes_per_token)
        if has_room and self.keep_on_host(donor.donor_id, self.pool.export(self.pool.index(donor.kv.slots))):
            self.donors.rebind(donor.donor_id, HostKV())
            self.num_spilled += 1
        else:
            self.donors.remove(donor.donor_id)
            self.num_dropped += 1
        self.allocator.release(donor.kv.slots, Owner.DONOR)
        return True

    def keep_on_host(self, key: StoreKey, block: KVBlock) -> bool:
        """Put a block into the store; False if that fails, which is no reason to fail the request that needs the room."""
        try:
            self.host.put(key, block)
        except Exception:
            logger.exception("the store does not keep a block of %d bytes; it is dropped", block.num_bytes)
            return False
        return True

    def make_host_room(self, num_bytes: int) -> bool:
        """Drop host donors, the least valuable first, until `num_bytes` fit; False if they cannot."""
        if num_bytes > self.host.budget_bytes:
            return False
        while not self.host.fits(num_bytes):
            victim = next((d for d in self.donors.victims() if isinstance(d.kv, HostKV)), None)
            if victim is None:
                return False
            self.remove_donor(victim.donor_id)
            self.num_dropped += 1
        return True

    def _forget_kv(self, donor: Donor) -> None:
        if isinstance(donor.kv, SlotKV):
            self.allocator.release(donor.kv.slots, Owner.DONOR)
        else:
            self.host.remove(donor.donor_id)

    def check(self) -> None:
        """Verify every invariant; raises `CorruptCacheError`. For tests and idle time."""
        for part in (self.allocator, self.prefix, self.donors, self.host):
            part.check()
        usage = self.usage()
        if usage.free + usage.request + usage.cached + usage.donor != usage.total:
            raise CorruptCacheError(f"slots are not conserved: {usage}")
        expected = self._host_keys()
        if len(expected) != len(self.host) or not all(key in self.host for key in expected):
            raise CorruptCacheError(f"{len(expected)} blocks belong on the host, which holds {len(self.host)}")
        held = [donor.kv.slots for donor in self.donors if isinstance(donor.kv, SlotKV)]
        distinct = len(np.unique(np.concatenate(held))) if held else 0
        if distinct != self.allocator.num_held(Owner.DONOR) or self.prefix.total_size != self.allocator.num_held(
            Owner.CACHE
        ):
            raise CorruptCacheError("donors or prefixes and the allocator disagree about who holds which slots")

    def _host_keys(self) -> set[StoreKey]:
        """Keys of the blocks that the host store ought to hold."""
        return {donor.donor_id for donor in self.donors if isinstance(donor.kv, HostKV)}
