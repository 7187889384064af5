"""All K/V of an engine with sliding windows: two spaces of slots, one prefix tree over both, donors on the host.

Requests hold a window slot as long as one of their rows can see it, the prefix cache until room is needed. Donors hold no
slots at all: theirs would be windows without another use. Their K/V are copied to host
memory when they leave the window (`capture`) or when the text is registered, and are grafted from there.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.engine.kv.kv_space import HostDonorKV, KVSpace
from kvgraft.engine.kv.window_row import WindowRow
from kvgraft.errors import CapacityError, CorruptCacheError
from kvgraft.memory import HybridSlotPool, KVBlock, Owner, SlotAllocator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvgraft.donors import Donor, DonorText
    from kvgraft.engine.kv.kept_prefixes import PrefixLock
    from kvgraft.engine.kv.state_row import StateRow
    from kvgraft.memory import SlotUsage, StoreKey
    from kvgraft.prefix import EvictResult, MatchResult, SWARadixCache
    from kvgraft.token_key import RadixKey
    from kvgraft.types import DonorId
    from kvgraft.windows import WindowKind

logger = logging.getLogger(__name__)


class HybridKVSpace(KVSpace):
    """Owns both allocators, the prefix cache, the donors and the host store. Not thread-safe.

    Attributes:
        windows: Holders of window slots, as `allocator` of full slots.

    Invariants (verified by `check`), besides those of `KVSpace`:
        - `free + cached + donor + request == total` of window slots, too.
        - The window slots with a CACHE reference are exactly those of the prefix cache.
        - No donor holds a slot of any space; the host store holds the donors' K/V and what was captured, nothing else.
    """

    _keeps_tails = False  # they would need window slots of their own, for less than a page

    def __init__(
        self,
        pool: HybridSlotPool,
        prefix: SWARadixCache,
        *,
        host_bytes: int,
        donor_tokens: int,
        min_run: int,
    ) -> None:
        super().__init__(pool, prefix, host_bytes=host_bytes, donor_tokens=donor_tokens, min_run=min_run)
        self.windows = SlotAllocator(pool.num_window_slots)
        self._pool = pool
        self._prefix = prefix
        self._captured: set[str] = set()

    @property
    def window_kind(self) -> WindowKind:
        """Keys that a row of a window layer sees."""
        return self._prefix.window

    @property
    def held_bytes(self) -> int:
        """Bytes of K/V on the device that requests or the prefix cache hold, in both spaces."""
        full, window = self.usage(), self.windows.usage()
        held = (full.total - full.free) * self._pool.full_bytes_per_token
        return held + (window.total - window.free) * self._pool.window.bytes_per_token

    @property
    def available_windows(self) -> int:
        """Window slots that no running request holds; eviction can free all of them."""
        usage = self.windows.usage()
        return usage.total - usage.request

    def window_usage(self) -> SlotUsage:
        """Count window slots that are free, or held by requests and prefixes."""
        return self.windows.usage()

    def allocate_windows(self, num_tokens: int, *, after: int | None = None) -> NDArray[np.int64]:
        """Give a request `num_tokens` window slots; cached windows leave where room is needed.

        Raises:
            CapacityError: There is no room to make; nothing was evicted.
        """
        if num_tokens > self.available_windows:
            raise CapacityError(
                f"{num_tokens} slots of window layers are needed and {self.available_windows} of {self.windows.num_slots} "
                "are not in use by running requests; shorten the prompt or raise num_slots"
            )
        while (shortage := num_tokens - self.windows.free_size) > 0:
            evicted = self._prefix.evict(0, shortage)
            if not len(evicted.swa_freed) and not self._let_oldest_go():
                raise CorruptCacheError(f"{shortage} window slots have no holder that could give them back")
            self._release_forgotten(evicted)
        return self.windows.allocate(num_tokens, after=after)

    def match(self, key: RadixKey) -> MatchResult:
        """Find the longest stored prefix of `key`, cut where the window begins that it needs.

        A lock covers whole nodes until a window is covered, and a match marks them as used. The cut, where it can be made,
        keeps that below two windows: one cached prompt would pin the whole space otherwise, and windows that no prompt reads
        any more would stay while those of other prompts leave. So it is made before the match.
        """
        length = self._prefix.look(key).prefix_len
        border = self.window_kind.first_needed(length)
        if border < length:
            self._prefix.cut(key, border)
        return self._prefix.match_prefix(key)

    def rebuild(self) -> None:
        """See `KVSpace.rebuild`."""
        self.windows.rebuild()
        self._captured.clear()
        super().rebuild()

    def store_prefix(
        self,
        key: RadixKey,
        slots: NDArray[np.int64],
        layers: WindowRow | StateRow | None,
        *,
        priority: int = 0,
        counted_len: int = 0,
    ) -> None:
        """See `KVSpace.store_prefix`; the window slots that the request still holds are stored, too."""
        assert isinstance(layers, WindowRow), "requests of a hybrid model have window slots"
        swa_indices, swa_start = layers.swa_indices[: len(slots)], layers.start
        page_size = self._prefix.page_size
        evicted = min(swa_start + -swa_start % page_size, len(key))
        evicted -= evicted % page_size
        result = self._prefix.insert(
            key,
            slots,
            priority=priority,
            counted_len=counted_len,
            swa_indices=swa_indices,
            swa_evicted_len=evicted,
        )
        offered = swa_indices[evicted : result.total_len]
        taken = offered[~np.isin(offered, result.swa_freed)]
        self.allocator.retain(slots[result.prefix_len : result.total_len], Owner.CACHE)
        self.windows.retain(taken, Owner.CACHE)

    def unlock_windows(self, lock: PrefixLock) -> None:
        """Release the window of a lock when its request is past it; the prefix itself stays locked."""
        if lock.epoch == self._epoch:
            self._release_forgotten(self._prefix.dec_swa_lock_only(lock.receipt))

    def export_windows(self, swa_indices: NDArray[np.int64]) -> KVBlock:
        """Copy window layers to CPU memory, the caller's."""
        return self._pool.export_windows(swa_indices)

    def capture(self, name: str, swa_indices: NDArray[np.int64]) -> bool:
        """Copy window layers to the host under `name`, for a donor to come; False if the host does not keep them."""
        num_bytes = len(swa_indices) * self._pool.window.bytes_per_token
        if not self.make_host_room(num_bytes):
            return False
        if self.copy_to_host(name, lambda: self._pool.export_windows(swa_indices)) is None:
            return False
        self._captured.add(name)
        return True

    def drop_captured(self, name: str) -> None:
        """Forget what `capture` kept."""
        self.host.remove(name)
        self._captured.discard(name)

    def add_host_donor(self, text: DonorText, slots: NDArray[np.int64], windows: KVBlock) -> DonorId | None:
        """Register text as a donor and copy its K/V to the host; less valuable donors leave, or it is not registered: None.

        `slots` are full slots and `windows` the window layers' K/V of each token; the rest is as in `Donor`.
        """
        donor_id = self._add_on_host(text)
        if donor_id is None:
            return None
        block = self.copy_to_host(donor_id, lambda: self._pool.export(slots, windows))
        return self._filled(donor_id, is_kept=block is not None)

    def join_host_donors(self, parts: Sequence[Donor], whole: DonorText) -> DonorId | None:
        """Make one donor of several on the host, whose text together is `whole`; None if that fails.

        The parts are gone in either case. What they have saved counts for the whole.
        """
        block = KVBlock.join([self.host.get(part.donor_id, 0, part.num_tokens) for part in parts])
        saved = sum(self.donors.saved_tokens(part.donor_id) for part in parts)
        for part in parts:
            self.remove_donor(part.donor_id)
        donor_id = self._add_on_host(whole)
        if donor_id is None or self._filled(donor_id, is_kept=self.keep_on_host(donor_id, block)) is None:
            return None
        self.donors.record_hit(donor_id, saved)
        return donor_id

    def _add_on_host(self, text: DonorText) -> DonorId | None:
        """Register a text whose K/V the host is about to get; None if there is no room for it."""
        num_tokens = len(text.token_ids)
        if not self.make_host_room(num_tokens * self.pool.bytes_per_token):
            logger.debug("text of %d tokens does not become a donor: host_bytes is too small", num_tokens)
            return None
        return self._add_to_catalogue(text, HostDonorKV())

    def _filled(self, donor_id: DonorId, *, is_kept: bool) -> DonorId | None:
        """Return a donor that was just registered; it is none if the host does not keep its K/V."""
        if is_kept:
            return donor_id
        self.donors.remove(donor_id)
        return None

    def reset(self) -> None:
        """Forget all prefixes and donors; running requests keep their slots."""
        self._release_forgotten(self._prefix.reset_both())
        super().reset()

    def _release_forgotten(self, result: EvictResult) -> None:
        super()._release_forgotten(result)
        self.windows.release_each(result.swa_freed, Owner.CACHE)

    def check(self) -> None:
        """Verify every invariant; raises `CorruptCacheError`. For tests and idle time."""
        super().check()
        self.windows.check()
        usage = self.windows.usage()
        if usage.free + usage.request + usage.cached + usage.donor != usage.total:
            raise CorruptCacheError(f"window slots are not conserved: {usage}")
        if self._prefix.swa_total_size != self.windows.num_references(Owner.CACHE):
            raise CorruptCacheError("the prefix cache and the allocator disagree about who holds which window slots")
        if self.usage().donor or usage.donor:
            raise CorruptCacheError("a donor of a hybrid model holds slots")

    def _host_keys(self) -> set[StoreKey]:
        return super()._host_keys() | self._captured
