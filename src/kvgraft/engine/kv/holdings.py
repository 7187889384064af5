"""Slots, locks, pins and reads of one attempt of a request, released whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvgraft.engine.kv.kv_space import PrefixKV
from kvgraft.memory import Owner

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    from numpy.typing import NDArray

    from kvgraft.donors import Donor
    from kvgraft.engine.kv.kept_prefixes import PrefixLock
    from kvgraft.engine.kv.kv_space import KVSpace
    from kvgraft.engine.kv.layer_rows import LayerRow
    from kvgraft.reuse.reads import StoredReads
    from kvgraft.types import DonorId


@dataclass(slots=True, eq=False)
class Holdings:
    """Everything that one attempt holds. A release is harmless where nothing is held.

    Attributes:
        space: Owner of all of it.
        kv_indices: int64, slot of each position; there may be more than tokens so far.
        lock: On the exact prefix.
        layers: Slots of layers that have slots of their own; `LayerSlots` moves and releases them.
        pinned: Donors that cannot be evicted before they are copied.
        stand_in_lock: On a stored prefix of other text, until it is copied.
        reads: Spans on their way from a store; None if none are.
    """

    space: KVSpace
    kv_indices: NDArray[np.int64]
    lock: PrefixLock | None
    layers: LayerRow | None = None
    pinned: list[DonorId] = field(default_factory=list)
    stand_in_lock: PrefixLock | None = None
    reads: StoredReads | None = None

    @property
    def has_donors(self) -> bool:
        """Whether K/V are kept from eviction until they are copied."""
        return bool(self.pinned) or self.stand_in_lock is not None

    @property
    def locks(self) -> list[PrefixLock]:
        """Locks on stored prefixes."""
        return [lock for lock in (self.lock, self.stand_in_lock) if lock is not None]

    def keep(self, donors: Iterable[Donor]) -> None:
        """Keep donors from eviction until `release_donors`."""
        for donor in donors:
            if isinstance(donor.kv, PrefixKV):
                self.stand_in_lock = self.space.lock(donor.kv.handle)
            else:
                self.space.donors.pin(donor.donor_id)
                self.pinned.append(donor.donor_id)

    def release_donors(self) -> None:
        """Unpin what is copied or is not to be; reads that are under way are cancelled."""
        if self.reads is not None:
            self.reads.cancel()
            self.reads = None
        while self.pinned:
            self.space.donors.unpin(self.pinned[-1])
            self.pinned.pop()
        if self.stand_in_lock is not None:
            lock, self.stand_in_lock = self.stand_in_lock, None
            self.space.unlock(lock)

    def release(self) -> None:
        """Give everything back but `layers`."""
        self.release_donors()
        if self.lock is not None:
            lock, self.lock = self.lock, None
            self.space.unlock(lock)
        if len(self.kv_indices):
            slots, self.kv_indices = self.kv_indices, self.kv_indices[:0]
            self.space.allocator.release(slots, Owner.REQUEST)
