"""K/V of donors on one rank: texts grow while text is computed and become donors when it is complete."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvgraft.memory.block import KVBlock
from kvgraft.memory.store import HostKVStore

if TYPE_CHECKING:
    from kvgraft.integrations.vllm.messages import TextId
    from kvgraft.types import DonorId


class DonorStore:
    """Host memory within a budget. The scheduler decides what stays; this only keeps. Not thread-safe."""

    def __init__(self, budget_bytes: int, *, pin_memory: bool) -> None:
        self._new_store = partial(HostKVStore, budget_bytes, pin_memory=pin_memory)
        self._store = self._new_store()
        self._texts: dict[TextId, list[KVBlock]] = {}

    @property
    def used_bytes(self) -> int:
        """Bytes of donors and texts."""
        return self._store.used_bytes + sum(part.num_bytes for parts in self._texts.values() for part in parts)

    def append(self, text_id: TextId, block: KVBlock) -> None:
        """Add the K/V of the next tokens of a text; tensors in host memory, which are the store's from now on."""
        self._texts.setdefault(text_id, []).append(block)

    def seal(self, text_id: TextId, donor_id: DonorId) -> None:
        """Turn a text into a donor.

        Raises:
            StoreError, CapacityError: It cannot be kept; the text is gone.
            KeyError: There is no such text.
        """
        self._store.put(donor_id, KVBlock.join(self._texts.pop(text_id)))

    def discard(self, text_id: TextId) -> None:
        """Forget a text; one that is not there is ignored, its capture may have failed."""
        self._texts.pop(text_id, None)

    def drop(self, donor_id: DonorId) -> None:
        """Forget a donor; one that is not there is ignored, its sealing may have failed."""
        if donor_id in self._store:
            self._store.remove(donor_id)

    @property
    def text_ids(self) -> frozenset[TextId]:
        """Texts that are being captured."""
        return frozenset(self._texts)

    def clear(self) -> None:
        """Forget everything."""
        self._texts.clear()
        self._store = self._new_store()

    def get(self, donor_id: DonorId, start: int, length: int) -> KVBlock:
        """View tokens of a donor; the view stays good after `drop`.

        Raises:
            StoreError: There is no such donor.
        """
        return self._store.get(donor_id, start, length)

    def check(self) -> None:
        """Verify the store's invariants; raises `CorruptCacheError`."""
        self._store.check()
