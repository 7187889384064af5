"""Slots of layers that have slots of their own: the interface, its behaviour without such layers, and what kinds share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from kvgraft.engine.kv.layer_books import LayerBooks
from kvgraft.errors import CorruptCacheError
from kvgraft.memory import Owner, SlotAllocator

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvgraft.engine.kv.kept_prefixes import PrefixLock
    from kvgraft.engine.kv.kv_space import KVSpace
    from kvgraft.engine.kv.layer_rows import LayerRow
    from kvgraft.engine.kv.request_kv import RequestKV
    from kvgraft.prefix import EvictResult, MatchResult, StateRadixCache, SWARadixCache


class LayerSlots(LayerBooks):
    """Takes requests' slots of layers that have slots of their own, and gives them back; here there are no such layers.

    `SlidingWindows` is for models with window layers, `RunningStates` for those with layers that keep a state. Not
    thread-safe.

    Attributes:
        space: The space whose part this is.
        num_errors: Captures for donors that failed; the text in question does not become a donor.
        longest_piece: Rows of one sequence that always have room if it runs alone; None for any number.
        can_rewind: Positions that were computed can be computed again.
    """

    num_errors: int = 0
    longest_piece: int | None = None
    can_rewind: bool = True

    def __init__(self, space: KVSpace) -> None:
        super().__init__(space.prefix)
        self.space = space
        space.layers = self

    def adopt(
        self, match: MatchResult | None, lock: PrefixLock | None, num_tokens: int, *, is_stored: bool, is_donor: bool
    ) -> LayerRow | None:
        """Return what a request holds that begins with its exact prefix; None where there is nothing to hold.

        Args:
            match: The prefix; None where none was looked for.
            lock: On the prefix.
            num_tokens: Of the prompt.
            is_stored: What the request computes is to be stored as a prefix.
            is_donor: Its text is to become a donor.

        Raises:
            CapacityError: There is no room to begin with.
        """
        return None

    def widen(self, kv: RequestKV) -> None:
        """Follow `kv.kv_indices` when it has grown."""

    def require_room(self, kv: RequestKV, num_tokens: int) -> None:
        """Raise `CapacityError` unless the request can begin to compute `num_tokens` positions."""

    def fill(self, kv: RequestKV, num_tokens: int) -> None:
        """Take slots for all positions up to `num_tokens`, for a graft.

        Raises:
            CapacityError: There are not enough.
        """

    def reserve(self, kv: RequestKV, positions: NDArray[np.int64]) -> int:
        """Prepare the rows at `positions`, ascending; returns how many of them are to be computed now, maybe none."""
        return len(positions)

    def grow(self, kv: RequestKV, num_tokens: int) -> None:
        """Prepare the rows up to `num_tokens` positions; all after the present ones are computed.

        Raises:
            CapacityError: There are not enough slots.
        """

    def advance(self, kv: RequestKV, num_computed: int) -> None:
        """Release what no row after the first `num_computed` positions can see; capture it if it is to be a donor."""

    def conclude(self, kv: RequestKV, num_computed: int) -> None:
        """Let what the request has after `num_computed` positions be stored with its prefix: it computes no more."""

    def release(self, row: LayerRow | None) -> None:
        """Give everything back; the lock is the caller's to release. Harmless for a row that has nothing."""


class OwnSlots(LayerSlots, ABC):
    """Base of layers that have slots of their own: requests and the prefix cache hold them, donors none.

    Invariants (verified by `check`):
        - `free + cached + request == total`.
        - The slots with a CACHE reference are exactly those of the prefix cache.

    Attributes:
        allocator: Holders of slots, as that of the space for those of tokens.
        bytes_per_slot: Of one of them.
    """

    can_rewind = False
    keeps_tails = False  # of less than a page: they would need windows for it, and no state is recorded there
    _kind: str
    """What has a slot, for messages."""
    _prefix: SWARadixCache | StateRadixCache

    def __init__(self, space: KVSpace, num_slots: int, bytes_per_slot: int) -> None:
        super().__init__(space)
        self.allocator = SlotAllocator(num_slots)
        self.bytes_per_slot = bytes_per_slot
        self.limit_bytes = num_slots * bytes_per_slot

    @property
    def held_bytes(self) -> int:
        """See `LayerBooks.held_bytes`."""
        usage = self.allocator.usage()
        return (usage.total - usage.free) * self.bytes_per_slot

    @property
    def available(self) -> int:
        """Slots that no running request holds."""
        usage = self.allocator.usage()
        return usage.total - usage.request

    @abstractmethod
    def _freed(self, result: EvictResult) -> NDArray[np.int64]:
        """Slots among what the prefix cache has forgotten."""

    @abstractmethod
    def _num_cached(self) -> int:
        """Slots that the prefix cache counts as its own."""

    def _make_room(self, num_slots: int) -> bool:
        """Have what is cached leave, sessions' last, until so many slots are free; False if that is not enough."""
        while (shortage := num_slots - self.allocator.free_size) > 0:
            evicted = self._prefix.evict(0, shortage)
            self.space.release_forgotten(evicted)
            if not len(self._freed(evicted)) and not self.space.let_oldest_go():
                return False
        return True

    def forget_all(self) -> EvictResult:
        """See `LayerBooks.forget_all`."""
        return self._prefix.reset_both()

    def release_forgotten(self, result: EvictResult) -> None:
        """See `LayerBooks.release_forgotten`."""
        self.allocator.release_each(self._freed(result), Owner.CACHE)

    def rebuild(self) -> None:
        """See `LayerBooks.rebuild`."""
        self.allocator.rebuild()

    def check(self) -> None:
        """See `LayerBooks.check`."""
        self.allocator.check()
        usage = self.allocator.usage()
        if usage.free + usage.request + usage.cached != usage.total:
            raise CorruptCacheError(f"{self._kind}s are not conserved: {usage}")
        if self._num_cached() != self.allocator.num_references(Owner.CACHE):
            raise CorruptCacheError(f"the prefix cache and the allocator disagree about who holds which {self._kind}s")
