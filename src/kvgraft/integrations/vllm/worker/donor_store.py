"""K/V of donors on one rank: texts grow while text is computed and become donors when it is complete."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.errors import CorruptCacheError
from kvgraft.memory.block import KVBlock

if TYPE_CHECKING:
    from kvgraft.integrations.vllm.messages import TextId
    from kvgraft.memory import HostKVStore
    from kvgraft.types import DonorId


class DonorStore:
    """Donors in a host store that nobody else uses, growing texts in host memory. Not thread-safe.

    The scheduler decides what stays; this only keeps.
    """

    def __init__(self, store: HostKVStore) -> None:
        self._store = store
        self._donor_ids: set[DonorId] = set()
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
        self.keep(donor_id, KVBlock.join(self._texts.pop(text_id)))

    def keep(self, donor_id: DonorId, block: KVBlock) -> None:
        """Keep a donor that was read elsewhere; tensors in host memory, which are the store's from now on.

        Raises:
            StoreError, CapacityError: It cannot be kept.
        """
        self._store.put(donor_id, block)
        self._donor_ids.add(donor_id)

    def whole(self, donor_id: DonorId) -> KVBlock | None:
        """View a donor's K/V; None if it is not there. The view stays good after `drop`."""
        return self._store.get(donor_id) if donor_id in self._donor_ids else None

    def discard(self, text_id: TextId) -> None:
        """Forget a text; one that is not there is ignored, its capture may have failed."""
        self._texts.pop(text_id, None)

    def drop(self, donor_id: DonorId) -> None:
        """Forget a donor; one that is not there is ignored, its sealing may have failed."""
        if donor_id in self._donor_ids:
            self._donor_ids.remove(donor_id)
            self._store.remove(donor_id)

    @property
    def text_ids(self) -> frozenset[TextId]:
        """Texts that are being captured."""
        return frozenset(self._texts)

    def clear(self) -> None:
        """Forget everything."""
        self._texts.clear()
        for donor_id in list(self._donor_ids):
            self.drop(donor_id)

    def get(self, donor_id: DonorId, start: int, length: int) -> KVBlock:
        """View tokens of a donor; the view stays good after `drop`.

        Raises:
            StoreError: There is no such donor.
        """
        return self._store.get(donor_id, start, length)

    def check(self) -> None:
        """Verify the store's invariants, and that it keeps the donors alone; raises `CorruptCacheError`."""
        self._store.check()
        if len(self._store) != len(self._donor_ids) or not all(key in self._store for key in self._donor_ids):
            raise CorruptCacheError(f"{len(self._donor_ids)} donors and {len(self._store)} blocks are kept")
