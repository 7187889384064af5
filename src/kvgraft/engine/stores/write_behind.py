"""K/V on their way from the engine into stores, without a copy on the engine's thread where that can be avoided.

On a CPU the writer's thread gathers them from the slots of the donor, page by page. The slots stay the engine's: it may
take them away at any time (`PendingWrite.move`), and waits for one page at most when it does. On an accelerator the engine's
thread copies a page per step, because other threads must not queue work beside it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING, Protocol

import torch

from kvgraft.errors import StoreError
from kvgraft.memory import KVBlock
from kvgraft.memory.store.record import PAGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvgraft.memory import LayerShape, SlotPool
    from kvgraft.memory.store.record import DonorRecord


logger = logging.getLogger(__name__)


class TakenAwayError(StoreError):
    """The slots of K/V were given to others before all were copied."""


class PageSource(Protocol):
    """Where the K/V of a donor's part lie."""

    def copy(self, start: int, stop: int, into: KVBlock) -> None:
        """Copy tokens `[start, stop)` of the part to the same places of `into`."""


class SlotPages:
    """K/V in slots of a pool."""

    def __init__(self, pool: SlotPool, slots: NDArray[np.int64]) -> None:
        """Take the slot of each token."""
        self._pool = pool
        self._slots = slots

    def copy(self, start: int, stop: int, into: KVBlock) -> None:
        """See `PageSource`."""
        place = self._pool.place(self._slots[start:stop])
        for layer, (to_keys, to_values) in enumerate(zip(into.keys, into.values, strict=True)):
            keys, values = place.read(layer)
            to_keys[start:stop].copy_(keys)
            to_values[start:stop].copy_(values)


class BlockPages:
    """K/V in host memory that do not change."""

    def __init__(self, block: KVBlock) -> None:
        """Take the K/V of all tokens."""
        self._block = block

    def copy(self, start: int, stop: int, into: KVBlock) -> None:
        """See `PageSource`."""
        part = self._block.span(start, stop - start)
        for target, source in zip((*into.keys, *into.values), (*part.keys, *part.values), strict=True):
            target[start:stop].copy_(source)


class PendingWrite:
    """A part of a donor that stores are to have. Its K/V may be moved or taken away while they are read. Thread-safe.

    Attributes:
        record: What is stored.
        waiting_for: Stores that have not reported its outcome.
        is_stored: Whether one has it.
    """

    def __init__(
        self, record: DonorRecord, layers: Sequence[LayerShape], dtype: torch.dtype, source: PageSource
    ) -> None:
        self.record = record
        self.waiting_for: set[int] = set()
        self.is_stored = False
        self._layers = layers
        self._dtype = dtype
        self._source: PageSource | None = source
        self._lock = threading.Lock()
        self._copied: KVBlock | None = None
        self._num_copied = 0

    def move(self, source: PageSource | None) -> None:
        """Read from elsewhere from now on, or give up what is not read yet (None); waits while a page is copied."""
        with self._lock:
            self._source = source

    def read(self) -> KVBlock | None:
        """Return the K/V, in memory of their own; None if they were taken away before.

        Complexity: O(tokens) at the first call.
        """
        try:
            while not self.copy_page():
                pass
        except TakenAwayError:
            return None
        return self._copied

    def copy_page(self) -> bool:
        """Copy one more page; True when all are.

        Raises:
            TakenAwayError: They were taken away.
        """
        with self._lock:
            stop = min(self._num_copied + PAGE_TOKENS, self.record.num_tokens)
            if self._num_copied < stop:
                if self._source is None:
                    raise TakenAwayError("the donor left memory before it was written")
                if self._copied is None:
                    self._copied = self._empty()
                self._source.copy(self._num_copied, stop, self._copied)
                self._num_copied = stop
            return stop == self.record.num_tokens

    def _empty(self) -> KVBlock:
        num_tokens = self.record.num_tokens
        sizes = [(num_tokens, shape.num_kv_heads, shape.head_dim) for shape in self._layers]
        keys, values = ([torch.empty(size, dtype=self._dtype) for size in sizes] for _ in range(2))
        return KVBlock(tuple(keys), tuple(values))


class StepExport:
    """Copies pending writes on the engine's thread, a page per step. Not thread-safe."""

    def __init__(self) -> None:
        self._queue: deque[PendingWrite] = deque()

    @property
    def is_busy(self) -> bool:
        """Whether `step` has anything to copy."""
        return bool(self._queue)

    def add(self, pending: PendingWrite) -> None:
        """Copy it in steps to come."""
        self._queue.append(pending)

    def step(self) -> PendingWrite | None:
        """Copy a page of the first; returns it when that was its last one, or when its K/V are gone or cannot be copied."""
        if not self._queue:
            return None
        first = self._queue[0]
        try:
            is_done = first.copy_page()
        except TakenAwayError:
            is_done = True
        except Exception:  # no step of the engine ends for it
            logger.exception("K/V of %d tokens cannot be copied for a store", first.record.num_tokens)
            first.move(None)
            is_done = True
        return self._queue.popleft() if is_done else None

    def clear(self) -> None:
        """Forget what waits."""
        self._queue.clear()
