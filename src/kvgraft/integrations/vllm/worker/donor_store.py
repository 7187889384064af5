"""K/V of donors on one rank: texts grow while text is computed and become donors when it is complete."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvgraft.errors import CapacityError, CorruptCacheError, StoreError
from kvgraft.integrations.vllm.worker.host_reader import TextCopy
from kvgraft.integrations.vllm.worker.text_reader import text_reader
from kvgraft.memory.packed import packed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    import numpy as np
    from numpy.typing import NDArray

    from kvgraft.integrations.vllm.messages import TextId
    from kvgraft.integrations.vllm.worker.group_kv import GroupKV
    from kvgraft.integrations.vllm.worker.host_reader import TextReader
    from kvgraft.memory import HostKVStore
    from kvgraft.memory.block import KVBlock
    from kvgraft.types import DonorId

logger = logging.getLogger(__name__)


class DonorStore:
    """Donors in a host store of their own, growing texts in host memory. Not thread-safe.

    The scheduler decides what stays; this only keeps. K/V may still be on their way from the device when a text grows or is
    sealed; only a graft that reads them waits for them.
    """

    def __init__(self, store: HostKVStore, reader: TextReader | None = None) -> None:
        """Keep donors in `store`; texts are read by `reader`, or by the one that fits the device of the first text."""
        self._store = store
        self._reader = reader
        self._donor_ids: set[DonorId] = set()
        self._texts: dict[TextId, list[TextCopy]] = {}
        self._arriving: dict[DonorId, TextCopy] = {}
        self._lost: set[DonorId] = set()

    @property
    def used_bytes(self) -> int:
        """Bytes of donors and texts, those on their way included."""
        parts = [part for parts in self._texts.values() for part in parts]
        return self._store.used_bytes + sum(part.num_bytes for part in (*parts, *self._arriving.values()))

    def capture(self, text_id: TextId, homes: Sequence[GroupKV], positions: NDArray[np.int64]) -> None:
        """Add the K/V of the next tokens of a text, as they are in `homes` now."""
        self._reader = self._reader or text_reader(homes[0].caches[0].device, self._store.memory)
        self._texts.setdefault(text_id, []).extend(self._reader.read(homes, positions))

    def append(self, text_id: TextId, block: KVBlock) -> None:
        """Add the K/V of the next tokens of a text; tensors in host memory, which are the store's from now on."""
        self._texts.setdefault(text_id, []).append(TextCopy.at_hand(block))

    def seal(self, text_id: TextId, donor_id: DonorId) -> None:
        """Turn a text into a donor. If its K/V do not arrive, `take_lost` names it.

        Raises:
            StoreError, CapacityError: It cannot be kept; the text is gone.
            KeyError: There is no such text.
        """
        parts = self._texts.pop(text_id)
        num_bytes = sum(part.num_bytes for part in parts)
        if donor_id in self._donor_ids:
            raise StoreError(f"there is a donor {donor_id} already: drop it first")
        if not self._store.fits(num_bytes + sum(part.num_bytes for part in self._arriving.values())):
            raise CapacityError(f"{num_bytes} bytes do not fit beside {self.used_bytes}")
        self._arriving[donor_id] = TextCopy(num_bytes, self._joined([part.block for part in parts]))
        self._donor_ids.add(donor_id)
        self.settle()
        if donor_id in self._lost:  # nothing was on its way: the caller hears of it at once
            self._lost.discard(donor_id)
            raise StoreError(f"donor {donor_id} could not be copied")

    def keep(self, donor_id: DonorId, block: KVBlock) -> None:
        """Keep a donor that was read elsewhere; tensors in host memory, which are the store's from now on.

        Raises:
            StoreError, CapacityError: It cannot be kept.
        """
        self._store.put(donor_id, block)
        self._donor_ids.add(donor_id)

    def settle(self) -> None:
        """Take the donors that have arrived; waits for none."""
        for donor_id in [donor_id for donor_id, part in self._arriving.items() if part.block.done()]:
            self._take(donor_id)

    def take_lost(self) -> set[DonorId]:
        """Return donors that were sealed since the last call and did not arrive."""
        lost, self._lost = self._lost, set()
        return lost

    def later(self, donor_id: DonorId) -> Callable[[], KVBlock | None] | None:
        """Return what gives a donor's K/V, once they have arrived, on any thread; None if there is no such donor.

        They stay valid after `drop`.
        """
        if donor_id not in self._donor_ids:
            return None
        part = self._arriving.get(donor_id)
        if part is not None:
            future = part.block
            return lambda: None if future.exception() is not None else future.result()
        block = self._store.get(donor_id)
        return lambda: block

    def discard(self, text_id: TextId) -> None:
        """Forget a text; one that is not there is ignored, its capture may have failed."""
        self._texts.pop(text_id, None)

    def drop(self, donor_id: DonorId) -> None:
        """Forget a donor; one that is not there is ignored, its sealing may have failed."""
        if donor_id not in self._donor_ids:
            return
        self._donor_ids.remove(donor_id)
        if self._arriving.pop(donor_id, None) is None:
            self._store.remove(donor_id)

    def __contains__(self, donor_id: DonorId) -> bool:
        return donor_id in self._donor_ids

    @property
    def donor_ids(self) -> frozenset[DonorId]:
        """All donors."""
        return frozenset(self._donor_ids)

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
        """View tokens of a donor, and wait for them if they are on their way; the view stays valid after `drop`.

        Raises:
            StoreError: There is no such donor.
        """
        if donor_id in self._arriving:
            self._take(donor_id)
        return self._store.get(donor_id, start, length)

    def close(self) -> None:
        """Finish copies that are on their way."""
        if self._reader is not None:
            self._reader.close()

    def check(self) -> None:
        """Verify the store's invariants, and that it keeps the donors alone; raises `CorruptCacheError`."""
        self._store.check()
        kept = self._donor_ids - self._arriving.keys()
        if len(self._store) != len(kept) or not all(key in self._store for key in kept):
            raise CorruptCacheError(f"{len(kept)} donors and {len(self._store)} blocks are kept")

    def _take(self, donor_id: DonorId) -> None:
        """Move a donor that was on its way into the store, or lose it."""
        part = self._arriving.pop(donor_id)
        try:
            self._store.put(donor_id, part.block.result())
        except Exception as error:  # noqa: BLE001 - a donor less is no reason to end the engine
            logger.warning("a donor is not kept: %s: %s", type(error).__name__, error)
            self._donor_ids.discard(donor_id)
            self._lost.add(donor_id)

    def _joined(self, parts: Sequence[Future[KVBlock]]) -> Future[KVBlock]:
        """Return one block of all parts, as the store keeps it; the thread that copies has them all by then."""
        if self._reader is None:
            return TextCopy.at_hand(self._one_of([part.result() for part in parts])).block
        return self._reader.thread.submit(lambda: self._one_of([part.result() for part in parts]))

    def _one_of(self, blocks: Sequence[KVBlock]) -> KVBlock:
        is_whole = len(blocks) == 1 and self._store.is_own(blocks[0])
        return blocks[0] if is_whole else packed(blocks, self._store.memory)
