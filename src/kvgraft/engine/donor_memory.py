"""What stores behind an engine need of its memory; `KVSpace` is it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvgraft.donors import Donor, DonorCatalogue
    from kvgraft.memory import HostKVStore, HybridSlotPool, KVBlock, SlotPool


class DonorMemory(Protocol):
    """Where donors lie in front of stores.

    Attributes:
        pool: The device's slots.
        donors: All donors, those of stores included.
        host: Host memory.
    """

    pool: SlotPool | HybridSlotPool
    donors: DonorCatalogue
    host: HostKVStore

    def slots_of(self, donor: Donor) -> NDArray[np.int64] | None:
        """Slot of each token of a donor whose K/V lie on the device; None if they do not."""

    def promote(self, donor: Donor, block: KVBlock) -> bool:
        """Have a donor lie on the host that lay in a store alone; False if the host does not keep it."""
