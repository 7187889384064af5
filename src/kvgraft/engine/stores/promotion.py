"""Promotion of stored donors to host memory: text that was used once is likely to be used again.

A request reads the spans that it needs and nothing else, because it waits for them. The whole donor is read after it, and a
thread puts its tensors in order; the engine's thread only takes them over.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from kvgraft.errors import StoreError
from kvgraft.memory import KVBlock
from kvgraft.memory.store.tier.tasks import TaskThreads
from kvgraft.reuse.stored import StoredKV

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvgraft.donors import Donor
    from kvgraft.engine.stores.donor_memory import DonorMemory
    from kvgraft.memory.store.tier import Fetch
    from kvgraft.types import DonorId

_PATIENCE_S = 30.0
"""Reads for promotions that take longer are given up."""


class Promotions:
    """Reads whole donors, one after another. Not thread-safe, but for the thread within."""

    def __init__(self, space: DonorMemory) -> None:
        self._space = space
        self._threads = TaskThreads("kvgraft-promotions")
        self._under_way: set[DonorId] = set()
        self._done: deque[tuple[DonorId, KVBlock | None]] = deque()

    @property
    def is_busy(self) -> bool:
        """Whether a donor is on its way."""
        return bool(self._under_way)

    def begin(self, donor: Donor, whole: Fetch | None, fetch: Callable[[], Fetch]) -> None:
        """Promote a donor, unless the host could not hold it or it is on its way already.

        Args:
            donor: A stored one.
            whole: A read of all of it that has ended, if there was one.
            fetch: Begins such a read otherwise.
        """
        num_bytes = donor.num_tokens * self._space.pool.bytes_per_token
        if donor.donor_id in self._under_way or num_bytes > self._space.host.budget_bytes:
            return
        donor_id, done = donor.donor_id, self._done
        if self._threads.submit(lambda: done.append((donor_id, _arrived(whole or fetch())))):
            self._under_way.add(donor_id)

    def step(self) -> list[Donor]:
        """Take over what has arrived; returns the donors that were promoted, as they were before."""
        promoted = []
        while self._done:
            donor_id, block = self._done.popleft()
            if donor_id not in self._under_way:
                continue  # of before a reset
            self._under_way.discard(donor_id)
            donor = self._space.donors.get(donor_id)
            if block is None or donor is None or not isinstance(donor.kv, StoredKV):
                continue
            if self._space.promote(donor, block):
                promoted.append(donor)
        return promoted

    def clear(self) -> None:
        """Forget what is on its way."""
        self._under_way.clear()

    def close(self) -> None:
        """End the thread."""
        self._threads.close()


def _arrived(fetch: Fetch) -> KVBlock | None:
    """Return the K/V in tensors of their own; None if they have not come."""
    if not fetch.wait(_PATIENCE_S):
        fetch.cancel()
        return None
    try:
        block = fetch.block()
    except StoreError:
        return None
    keys, values = ([tensor.contiguous() for tensor in tensors] for tensors in (block.keys, block.values))
    return KVBlock(tuple(keys), tuple(values))
