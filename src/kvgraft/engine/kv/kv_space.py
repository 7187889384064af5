"""All K/V of an engine: slots on the device, exact prefixes, donors on device and host, and how room is made.

Running requests, the prefix cache and donors may hold a slot; the allocator counts references of each. When slots run
out, prefixes go first as their policy says, then the least valuable donors move to host memory, then they are dropped, or
lie in a store alone if one has them (`StoreTier`). What is kept for sessions goes last. Using a donor uses its
prefix, too. Prefixes live on in host memory where there is a tier for them (`HostTier`), and come back on a match.

Layers that have slots of their own are a part of the space (`LayerSlots`), and the prefix cache knows these slots, too.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.donors import Donor, DonorCatalogue
from kvgraft.engine.kv.kept_prefixes import KeptPrefix, KeptPrefixes, PrefixLock
from kvgraft.engine.kv.layer_books import LayerBooks
from kvgraft.errors import CapacityError, CorruptCacheError
from kvgraft.graft.executor import BlockSource
from kvgraft.memory import HostKVStore, Owner, SlotAllocator, SlotPool
from kvgraft.memory.page_lock import CudaPages
from kvgraft.prefix import EvictResult
from kvgraft.reuse.failures import Soundness
from kvgraft.reuse.stored import StoredKV
from kvgraft.token_key import RadixKey

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    from numpy.typing import NDArray

    from kvgraft.donors import DonorText
    from kvgraft.engine.kv.host_tier import HostTier
    from kvgraft.engine.kv.layer_rows import LayerRow
    from kvgraft.engine.stores.store_tier import StoreTier
    from kvgraft.graft.executor import KVSource
    from kvgraft.memory import HybridSlotPool, KVBlock, SlotUsage, StoreKey
    from kvgraft.prefix import HierarchicalRadixCache, HierarchicalStateCache, MatchResult, PrefixCache, PrefixHandle
    from kvgraft.types import DonorId, Match

logger = logging.getLogger(__name__)

_WORTH_SPILLING = 0.5
"""Share of a donor's slots that its going must free. The part of a text after its last whole page, which no prefix has, is
smaller: at least a page comes before it."""


@dataclass(frozen=True, slots=True, eq=False)
class SlotKV:
    """K/V of a donor that lie in slots of the pool, one per token."""

    slots: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PrefixKV(SlotKV):
    """K/V of a stored prefix, in no catalogue; they stay while `handle` is locked."""

    handle: PrefixHandle


@dataclass(frozen=True, slots=True)
class StoredContinuation:
    """Text that the prefix cache has for requests that go on from it: its length in tokens, and its generation."""

    length: int
    generation: int


@dataclass(frozen=True, slots=True)
class HostDonorKV:
    """K/V of a donor that lie in the host store under its id."""


class KVSpace(Soundness):
    """Owns allocator, prefix cache, donor catalogue and host store over one pool. Not thread-safe.

    Invariants (verified by `check`):
        - `free + cached + donor + request == total` slots.
        - The prefix cache's slots, and the tails kept for sessions, are exactly those with CACHE references: exact prefixes,
          and under other names, which share their slots, what requests go on from.
        - Donors' slots are exactly those with a DONOR reference.
        - A donor's K/V lie in slots, in the host store, or in a store alone. The host store holds nothing else but what
          layers with slots of their own have put there for donors to come.
        - A slot of a host tier is free or holds a token of the prefix cache.
        - Those of `layers`.

    Attributes:
        layers: Those that have slots of their own.
        stores: Stores that K/V go to after host memory; None without any.
        num_loaded_tokens: Tokens of prefixes that came back from host memory.
    """

    stores: StoreTier | None = None

    def __init__(
        self,
        pool: SlotPool | HybridSlotPool,
        prefix: PrefixCache,
        *,
        host_bytes: int,
        donor_tokens: int,
        min_run: int,
        tier: HostTier | None = None,
    ) -> None:
        """Begin with all slots free.

        Args:
            pool: The bytes.
            prefix: Decides which prefixes stay; one of two tiers if `tier` is given.
            host_bytes: Of donors in host memory.
            donor_tokens: Of donors in all tiers.
            min_run: Tokens of the shortest run that is found in a donor.
            tier: Where prefixes live on that leave the device; None where they are gone then.
        """
        self.pool = pool
        self.allocator = SlotAllocator(pool.num_slots)
        self.prefix = prefix
        self.donors = DonorCatalogue(donor_tokens, min_run=min_run)
        self.host = HostKVStore(host_bytes, pages=CudaPages() if pool.device.type == "cuda" else None)
        self.kept = KeptPrefixes(pool.num_slots)
        self.num_spilled = 0
        self.num_dropped = 0
        self.num_loaded_tokens = 0
        self.layers = LayerBooks(prefix)
        self._tier = tier
        self._tiered: HierarchicalRadixCache | HierarchicalStateCache | None = None
        if tier is not None:
            from kvgraft.prefix import HierarchicalRadixCache, HierarchicalStateCache  # loaded with their tier

            assert isinstance(prefix, HierarchicalRadixCache | HierarchicalStateCache), "a cache of two tiers"
            self._tiered = prefix
            tier.serve(self.allocator, self.allocate)
        self._num_known_failures = 0
        self._num_uncopied = 0
        self._num_unheard = 0
        self._epoch = 0
        self._unreturned: list[PrefixLock] = []

    @property
    def epoch(self) -> int:
        """Resets so far: K/V that a request began to compute in an earlier epoch are not kept."""
        return self._epoch

    @property
    def prefix_host_tokens(self) -> int:
        """Tokens of prefixes with a copy in host memory."""
        return 0 if self._tiered is None else self._tiered.host_size

    @property
    def prefix_host_bytes(self) -> int:
        """Bytes of what exact prefixes have in host memory."""
        return self.prefix_host_tokens * self.pool.bytes_per_token + self.layers.prefix_host_bytes

    @property
    def num_errors(self) -> int:
        """Failures in here that became misses: copies to the host and back, and calls of another package's prefix cache."""
        return self._num_uncopied + self._num_unheard + self._num_failed_transfers

    @property
    def _num_failed_transfers(self) -> int:
        return 0 if self._tiered is None else self._tiered.num_failed_transfers

    @property
    def is_doubtful(self) -> bool:
        """See `Soundness.is_doubtful`; a transfer that failed may have left host slots that neither side counts."""
        return super().is_doubtful or self._num_failed_transfers > self._num_known_failures

    def trust(self) -> None:
        """See `Soundness.trust`."""
        super().trust()
        self._num_known_failures = self._num_failed_transfers

    def usage(self) -> SlotUsage:
        """Count slots that are free, or held by requests, prefixes and donors."""
        return self.allocator.usage()

    def window_usage(self) -> SlotUsage | None:
        """See `LayerBooks.window_usage`."""
        return self.layers.window_usage()

    def state_usage(self) -> SlotUsage | None:
        """See `LayerBooks.state_usage`."""
        return self.layers.state_usage()

    @property
    def held_bytes(self) -> int:
        """Bytes of K/V and states on the device that requests, the prefix cache or donors hold."""
        usage = self.usage()
        return (usage.total - usage.free) * self._bytes_per_slot + self.layers.held_bytes

    @property
    def limit_bytes(self) -> int:
        """Bytes of all that is allocated on the device for K/V and states."""
        return self.allocator.num_slots * self._bytes_per_slot + self.layers.limit_bytes

    @property
    def _bytes_per_slot(self) -> int:
        pool = self.pool
        return pool.bytes_per_token if isinstance(pool, SlotPool) else pool.full_bytes_per_token

    @property
    def available(self) -> int:
        """Slots that no running request holds: free ones, and what eviction can free if no donor is pinned."""
        usage = self.usage()
        return usage.total - usage.request

    def allocate(self, num_tokens: int, *, after: int | None = None) -> NDArray[np.int64]:
        """Give a request `num_tokens` slots; make room where needed.

        Raises:
            CapacityError: There is no room to make. Nothing is evicted in vain unless pinned donors are in the way.
        """
        if num_tokens > self.available:
            raise self._shortage(num_tokens)
        if num_tokens > self.allocator.free_size:
            self._make_room(num_tokens)
        return self.allocator.allocate(num_tokens, after=after)

    def source(self, donor: Donor, match: Match) -> KVSource:
        """Return the K/V of the matched part of `donor`, from the tier that holds them."""
        start, stop = match.donor_start, match.donor_start + match.length
        slots = self.slots_of(donor)
        if slots is not None:
            return self.pool.place(slots[start:stop])
        return BlockSource(self.host.get(donor.donor_id, start, match.length), self.pool.device)

    def slots_of(self, donor: Donor) -> NDArray[np.int64] | None:
        """Return the slot of each token of a donor; None if its K/V do not lie on the device."""
        return donor.kv.slots if isinstance(donor.kv, SlotKV) else None

    def tier_of(self, donor: Donor) -> str:
        """Return where the K/V of a donor lie: `device`, `host` or the name of a store."""
        if isinstance(donor.kv, StoredKV):
            return "store" if self.stores is None else self.stores.label(donor)
        return "host" if isinstance(donor.kv, HostDonorKV) else "device"

    def match(self, key: RadixKey) -> MatchResult:
        """Find the longest stored prefix of `key`, and bring what lies on the host to the device; lock it at once.

        Where that fails the match is the part on the device. A request without room for its prefix has none for its
        prompt either, so nothing is gained by bringing back a part.
        """
        self.layers.cut(key)
        match = self.prefix.match_prefix(key)
        # The part on the device stays, so its slots are no room: without this a hopeless load would evict all the others.
        if self._tiered is None or not 0 < match.host_hit_len <= self.available - match.prefix_len:
            return match
        loaded = self._tiered.load_back(match)
        self.release_forgotten(EvictResult(loaded.freed, state_freed=loaded.state_freed))
        self.num_loaded_tokens += loaded.prefix_len - match.prefix_len
        return self.prefix.match_prefix(key)

    def longest_continuation(self, keys: Iterable[tuple[int, RadixKey]]) -> StoredContinuation | None:
        """Return the longest of what is stored under `(generation, key)`, of equal ones the first; None if nothing is.

        Moves nothing.
        """
        stored = [StoredContinuation(self.prefix.look(key).total, generation) for generation, key in keys]
        longest = max(stored, key=lambda known: known.length, default=None)
        return longest if longest is not None and longest.length else None

    def tail_behind(self, name: Hashable, key: RadixKey, match: MatchResult) -> NDArray[np.int64]:
        """Return slots that continue a match of `key` with what is kept under `name` beyond whole pages; maybe none."""
        return self.kept.tail_behind(name, key, match.prefix_len)

    def store_prefix(
        self,
        key: RadixKey,
        slots: NDArray[np.int64],
        row: LayerRow | None,
        *,
        priority: int = 0,
        counted_len: int = 0,
    ) -> None:
        """Give the prefix cache the K/V of `key`, in whole pages; the request goes on holding its slots, too.

        Of layers that keep states it takes over those that were recorded, and nothing is stored beyond the last of them.

        Args:
            key: Tokens and namespace.
            slots: Slot of each.
            row: The request's slots of layers that have slots of their own; None where there are no such layers.
            priority: Of the request.
            counted_len: Tokens that the request has stored before, which count as used once.
        """
        result = self.layers.insert(key, slots, row, priority=priority, counted_len=counted_len)
        taken = slots[result.prefix_len : result.total_len]
        self.allocator.retain(taken, Owner.CACHE)
        # A turn begins with its session's tail. Where it is aborted after this, a page of the cache's has the tail, and a
        # turn that went on from it with other text would store its slots in a second page.
        for tail in self.kept.cut_tails(taken):
            self.allocator.release(tail, Owner.CACHE)

    def lock(self, handle: PrefixHandle) -> PrefixLock:
        """Keep the prefix of `handle` from eviction until `unlock`."""
        receipt = self.prefix.inc_lock_ref(handle)
        try:
            return PrefixLock(receipt, self._epoch)
        except BaseException:
            self.release_forgotten(self.prefix.dec_lock_ref(receipt))
            raise

    def unlock(self, lock: PrefixLock) -> None:
        """Give back a lock on a prefix, which may have been forgotten since; one that is not taken back is counted."""
        if lock.epoch != self._epoch:
            return
        try:
            forgotten = self.prefix.dec_lock_ref(lock.receipt)
        except Exception as error:
            self.doubt(error)
            self._num_unheard += 1
            if not self.prefix.is_empty_prefix(lock.receipt):
                self._unreturned.append(lock)
            logger.exception("the prefix cache does not take a lock back; its prefix stays for now")
            return
        self.release_forgotten(forgotten)

    def keep(self, name: Hashable, key: RadixKey, slots: NDArray[np.int64]) -> None:
        """Keep the K/V of `key` from eviction under `name`, instead of what was kept there before.

        The oldest leave where they are more than their share, and all of them before a request goes without.

        Args:
            name: Of the session.
            key: Tokens and namespace; `store_prefix` was called for them.
            slots: Slot of each, held by the caller.
        """
        self.let_go(name)
        if len(key) > self.kept.max_slots:
            return
        match = self.match(key)
        lock = self.lock(match.handle)
        tail = slots[match.prefix_len :] if self.layers.keeps_tails else slots[:0]
        self.allocator.retain(tail, Owner.CACHE)
        own = RadixKey(key.token_ids[: match.prefix_len + len(tail)].copy(), key.extra_key, key.cache_salt)
        held = np.concatenate([match.kv_indices, tail])
        self.kept.add(name, KeptPrefix(own, held, match.prefix_len, lock))
        while self.kept.num_slots > self.kept.max_slots:
            self.let_oldest_go()

    def let_go(self, name: Hashable) -> None:
        """Keep nothing under `name`; the prefix cache still has it until room is needed."""
        self._release_kept(self.kept.pop(name))

    def let_oldest_go(self) -> bool:
        """Keep nothing for the session that has lain longest; False if nothing is kept."""
        return self._release_kept(self.kept.pop_oldest())

    def _release_kept(self, kept: KeptPrefix | None) -> bool:
        if kept is None:
            return False
        self.unlock(kept.lock)
        if len(kept.tail):
            self.allocator.release(kept.tail, Owner.CACHE)
        return True

    def add_host_donor(self, text: DonorText, export: Callable[[], KVBlock]) -> DonorId | None:
        """Register text as a donor whose K/V `export` copies to the host; None if it cannot be kept there.

        Less valuable donors leave for it.
        """
        num_tokens = len(text.token_ids)
        if not self.make_host_room(num_tokens * self.pool.bytes_per_token):
            logger.debug("text of %d tokens does not become a donor: host_bytes is too small", num_tokens)
            return None
        donor_id = self._add_to_catalogue(text, HostDonorKV())
        if donor_id is not None and self.copy_to_host(donor_id, export) is None:
            self.donors.remove(donor_id)
            return None
        return donor_id

    def add_donor(self, text: DonorText, slots: NDArray[np.int64]) -> DonorId | None:
        """Register text whose K/V lie in `slots` as a donor; None if it is too short or the catalogue cannot take it."""
        donor_id = self._add_to_catalogue(text, SlotKV(slots))
        if donor_id is not None:
            self.allocator.retain(slots, Owner.DONOR)
        return donor_id

    def _add_to_catalogue(self, text: DonorText, kv: SlotKV | HostDonorKV) -> DonorId | None:
        try:
            result = self.donors.add(
                text.namespace,
                text.token_ids,
                kv,
                generation=text.generation,
                start_position=text.start_position,
                front=text.front,
                before=text.before,
            )
        except CapacityError as error:
            logger.debug("text does not become a donor: %s", error)
            return None
        for evicted in result.evicted:
            self._forget_kv(evicted)
        return None if result.donor is None else result.donor.donor_id

    def record_use(self, donor_id: DonorId, num_tokens: int) -> None:
        """Count `num_tokens` that a donor saved, and its prefix as used now. One that is gone is ignored.

        A donor without its prefix holds its slots alone, and is what makes room next. So the prefix of one that was just
        used must not leave before those of donors without a use.
        """
        self.donors.record_hit(donor_id, num_tokens)
        donor = self.donors.get(donor_id)
        if donor is not None and isinstance(donor.kv, SlotKV) and not donor.start_position:
            self.prefix.match_prefix(RadixKey(donor.token_ids.astype(np.int64), donor.namespace.key))

    def remove_donor(self, donor_id: DonorId) -> None:
        """Forget a donor and its K/V."""
        self._forget_kv(self.donors.remove(donor_id))

    def reset(self) -> None:
        """Forget all prefixes and donors, those kept for sessions, too; running requests keep their slots."""
        self._epoch += 1  # locks of before hold nothing any more
        self._unreturned.clear()
        while self.let_oldest_go():
            pass
        self.release_forgotten(self.layers.forget_all())
        for donor in self.donors.reset():
            self._forget_kv(donor)

    def rebuild(self) -> None:
        """Begin anew with everything empty, without a look at what may be half changed. Requests hold nothing any more."""
        self._epoch += 1  # locks of before hold nothing any more
        self._unreturned.clear()
        if self._tier is not None:
            self._tier.slots.rebuild()
        self.layers.rebuild()
        self.allocator.rebuild()
        self.prefix.rebuild()
        self.kept.rebuild()
        self.host.rebuild()
        self.donors.reset()

    def _make_room(self, num_tokens: int) -> None:
        while (shortage := num_tokens - self.allocator.free_size) > 0:
            evicted = self._evicted(shortage)
            self.release_forgotten(evicted)
            if self.allocator.free_size >= num_tokens:
                return
            if self._spill_donor(if_need_be=False) or len(evicted.freed):
                continue
            if not self.let_oldest_go() and not self._spill_donor(if_need_be=True):
                raise self._shortage(num_tokens)

    def _evicted(self, num_tokens: int) -> EvictResult:
        """Have the prefix cache evict; one that fails has evicted nothing."""
        try:
            return self.prefix.evict(num_tokens)
        except Exception as error:
            self.doubt(error)
            self._num_unheard += 1
            logger.exception("the prefix cache cannot evict; room is made elsewhere")
            return EvictResult(np.empty(0, np.int64))

    def release_forgotten(self, result: EvictResult) -> None:
        """Take back slots that the prefix cache has forgotten."""
        self.allocator.release_each(result.freed, Owner.CACHE)
        self.layers.release_forgotten(result)

    def _shortage(self, num_tokens: int) -> CapacityError:
        return CapacityError(
            f"{num_tokens} KV slots are needed and {self.available} of {self.allocator.num_slots} are not in use by running "
            "requests; shorten the prompt or raise num_slots"
        )

    def _spill_donor(self, *, if_need_be: bool) -> bool:
        """Move a donor to the host, or drop it; False if there is none to move.

        It is the least valuable one that frees most of its slots. One with a text that is a stored prefix, too, makes no
        room: the prefix would have to leave next, against the eviction policy. It goes only `if_need_be`, for a last
        page that the prefix cache does not have.
        """
        donor = self._victim(_WORTH_SPILLING)
        if donor is None and if_need_be:
            donor = self._victim(0.0)
        if donor is None:
            return False
        assert isinstance(donor.kv, SlotKV)
        assert isinstance(self.pool, SlotPool), "donors of a hybrid model lie on the host"
        if self._spill(donor, donor.kv.slots, self.pool):
            self.num_spilled += 1
        elif not self._demote(donor):
            self.donors.remove(donor.donor_id)
            self.num_dropped += 1
        self.allocator.release(donor.kv.slots, Owner.DONOR)
        return True

    def _spill(self, donor: Donor, slots: NDArray[np.int64], pool: SlotPool) -> bool:
        """Copy a donor to the host; False if there is no room for it."""
        if not self.make_host_room(len(slots) * pool.bytes_per_token):
            return False
        block = self.copy_to_host(donor.donor_id, lambda: pool.export(pool.index(slots)))
        if block is None:
            return False
        self.donors.rebind(donor.donor_id, HostDonorKV())
        if self.stores is not None:
            self.stores.writes.moved(donor.donor_id, block)
        return True

    def _demote(self, donor: Donor) -> bool:
        """Keep a donor in a store alone; False if none has it. The caller frees its K/V."""
        return self.stores is not None and self.stores.demote(donor)

    def promote(self, donor: Donor, block: KVBlock) -> bool:
        """Keep a stored donor on the host, too; False if the host does not keep it."""
        if not self.make_host_room(block.num_bytes) or not self.keep_on_host(donor.donor_id, block):
            return False
        self.donors.rebind(donor.donor_id, HostDonorKV())
        return True

    def _victim(self, share: float) -> Donor | None:
        """Return the least valuable donor that alone holds more than `share` of its slots."""
        for donor in self.donors.victims():
            if isinstance(donor.kv, SlotKV):
                slots = donor.kv.slots
                if self.allocator.num_counted(slots, Owner.DONOR) > share * len(slots):
                    return donor
        return None

    def copy_to_host(self, key: StoreKey, export: Callable[[], KVBlock]) -> KVBlock | None:
        """Copy K/V to host memory and put them into the store; None if either fails, as for `keep_on_host`."""
        try:
            block = export()
        except Exception as error:
            self.doubt(error)
            self._num_uncopied += 1
            logger.exception("K/V cannot be copied to host memory; they are dropped")
            return None
        return block if self.keep_on_host(key, block) else None

    def keep_on_host(self, key: StoreKey, block: KVBlock) -> bool:
        """Put a block into the store; False if that fails, which is no reason to fail the request that needs the room."""
        try:
            self.host.put(key, block)
        except Exception as error:
            self.doubt(error)
            logger.exception("the store does not keep a block of %d bytes; it is dropped", block.num_bytes)
            return False
        return True

    def make_host_room(self, num_bytes: int) -> bool:
        """Drop host donors, the least valuable first, until `num_bytes` fit; False if they cannot.

        What stores have of them they keep.
        """
        if num_bytes > self.host.budget_bytes:
            return False
        while not self.host.fits(num_bytes):
            victim = next((d for d in self.donors.victims() if isinstance(d.kv, HostDonorKV)), None)
            if victim is None:
                return False
            if self._demote(victim):
                self.host.remove(victim.donor_id)
                continue
            self.remove_donor(victim.donor_id)
            self.num_dropped += 1
        return True

    def _forget_kv(self, donor: Donor) -> None:
        if isinstance(donor.kv, SlotKV):
            self.allocator.release(donor.kv.slots, Owner.DONOR)
        elif isinstance(donor.kv, HostDonorKV):
            self.host.remove(donor.donor_id)

    def check(self) -> None:
        """Verify every invariant; raises `CorruptCacheError`. For tests and idle time."""
        for part in (self.allocator, self.prefix, self.donors, self.host, self.kept):
            part.check()
        if self.stores is not None:
            self.stores.writes.check()
        usage = self.usage()
        if usage.free + usage.request + usage.cached + usage.donor != usage.total:
            raise CorruptCacheError(f"slots are not conserved: {usage}")
        expected = self._host_keys()
        if len(expected) != len(self.host) or not all(key in self.host for key in expected):
            raise CorruptCacheError(f"{len(expected)} blocks belong on the host, which holds {len(self.host)}")
        held = [donor.kv.slots for donor in self.donors if isinstance(donor.kv, SlotKV)]
        distinct = len(np.unique(np.concatenate(held))) if held else 0
        cached = self.prefix.total_size + self.kept.num_tail_slots
        if distinct != self.allocator.num_held(Owner.DONOR) or cached != self.allocator.num_references(Owner.CACHE):
            raise CorruptCacheError("donors or prefixes and the allocator disagree about who holds which slots")
        self.layers.check()
        if self._tier is not None and self._tiered is not None:
            self._tier.check(self._tiered.host_size, "tokens")

    def check_held(self, locks: Iterable[PrefixLock], num_pins: int) -> None:
        """Verify that locks and pins are those of requests, which are given, and of sessions.

        Raises:
            CorruptCacheError: One was lost, and its prefix or donor would stay for good, or leave too early.
        """
        if num_pins != self.donors.num_pins:
            raise CorruptCacheError(
                f"requests hold {num_pins} pins of donors, of which {self.donors.num_pins} are counted"
            )
        num_locks, counted = self._num_locks(locks), self.prefix.num_locks()
        # The cache may have taken a lock back although it failed.
        if counted is not None and not num_locks <= counted <= num_locks + len(self._unreturned):
            raise CorruptCacheError(
                f"requests and sessions hold {num_locks} locks of prefixes, of which {counted} are counted"
            )

    def retry_unlocks(self, locks: Iterable[PrefixLock]) -> bool:
        """Give back what `unlock` could not, after a check has passed.

        Only where the cache took none of them back although it failed: a second time would give back another's.

        Args:
            locks: Those that requests hold.

        Returns:
            Whether nothing failed this time; otherwise a change was interrupted, and is to be verified.
        """
        if not self._unreturned or self.prefix.num_locks() != self._num_locks(locks) + len(self._unreturned):
            return True
        while self._unreturned:
            try:
                forgotten = self.prefix.dec_lock_ref(self._unreturned[-1].receipt)
            except Exception:  # noqa: BLE001 - it was logged when it failed first
                return False
            self._unreturned.pop()
            self.release_forgotten(forgotten)
        return True

    def _num_locks(self, locks: Iterable[PrefixLock]) -> int:
        """Locks that the prefix cache should count for requests and sessions."""
        current = [lock for lock in (*self.kept.locks, *locks) if lock.epoch == self._epoch]
        return sum(not self.prefix.is_empty_prefix(lock.receipt) for lock in current)

    def _host_keys(self) -> set[StoreKey]:
        """Return the keys of the blocks that belong in the host store."""
        donors = (donor.donor_id for donor in self.donors if isinstance(donor.kv, HostDonorKV))
        return {*donors, *self.layers.host_keys}
