"""The part of an engine's memory that its stores need; `KVSpace` implements it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvgraft.donors import Donor, DonorCatalogue
    from kvgraft.memory import HostKVStore, HybridSlotPool, KVBlock, SlotPool


class DonorMemory(Protocol):
    """Device, host and catalogue; the latter has the donors of stores, too."""

    pool: SlotPool | HybridSlotPool
    donors: DonorCatalogue
    host: HostKVStore

    def slots_of(self, donor: Donor) -> NDArray[np.int64] | None:
        """Return the slot of each token of a donor, int64 `(n,)`; None if its K/V do not lie on the device."""

    def promote(self, donor: Donor, block: KVBlock) -> bool:
        """Move a donor from a store to the host; False if the host does not keep it."""
