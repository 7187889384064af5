"""Host memory for K/V that is used again: new memory costs a page fault per 4 KiB, longer than the copy that fills it.

850 tokens of SmolLM2 in float32, 39 MB, one thread: 13 ms into new memory, 2.5 ms into memory that was used before. Pages of
2 MiB make new memory cheap where the kernel has such pages, and cost 100 ms where it has to make them first. So memory that
comes back is kept for later blocks, and what the next block will need is touched by a thread, a moment after the last one.

Page-locked memory is kept in the same way, within a limit: a piece for which no room is left comes from memory that is not.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvgraft.memory.extents import FreeExtents

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvgraft.memory.extents import SlotArray
    from kvgraft.memory.page_lock import PageLock

logger = logging.getLogger(__name__)

UNIT = 1 << 16
"""Bytes in which slabs are divided."""
LEAST_BYTES = 1 << 20
"""Smaller pieces are left to the system's own allocator, which has such memory at hand."""
_SLAB_BYTES = 256 << 20
_SLABS_OF_LIMIT = 8
"""Slabs of which page-locked memory is made, or more where these would be longer than it takes to lock one in a moment."""
_PAGE = 4096
_REST_S = 0.05
"""Between a block and the touching of memory for the next one: an answer that is on its way goes first."""


@dataclass(slots=True, eq=False)
class _Slab:
    """A piece of memory, of which units below `touched` have pages."""

    memory: NDArray[np.uint8]
    free: FreeExtents
    touched: int = 0

    @classmethod
    def of(cls, num_units: int) -> _Slab:
        # Private, and without a wish for large pages: see above.
        pages = mmap.mmap(-1, num_units * UNIT, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return cls(np.frombuffer(pages, np.uint8), FreeExtents(num_units))

    def take(self, num_units: int) -> SlotArray | None:
        """Take units side by side; None if there are not so many."""
        if len(self.free.slots()) < num_units:
            return None
        units = self.free.take(num_units)
        if units[-1] - units[0] + 1 == num_units:
            return units
        self.free.give_back(units)
        return None

    def has_room(self, num_units: int) -> bool:
        """Return whether there are so many units side by side."""
        units = self.take(num_units)
        if units is None:
            return False
        self.free.give_back(units)
        return True


@dataclass(eq=False)
class HostMemory:
    """Pieces of memory of any size, each used again when the last tensor that views it has gone. Thread-safe.

    Attributes:
        slab_bytes: Memory that is asked of the system at once, or more where a piece is longer; it has pages once it is used.
        touches: Whether a thread touches what the next piece will need.
        num_touched: Units that the thread has touched.
        pages: Locks the pages of slabs; None leaves them to the system. A device may still read what came back: memory is
            used again after it has settled.
        limit_bytes: Most memory that is locked. What does not fit is taken from `HOST_MEMORY`.
    """

    slab_bytes: int = _SLAB_BYTES
    touches: bool = True
    num_touched: int = 0
    pages: PageLock | None = None
    limit_bytes: int = 0
    _slabs: list[_Slab] = field(default_factory=list)
    _returned: deque[tuple[_Slab, SlotArray]] = field(default_factory=deque)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _wishes: SimpleQueue[tuple[_Slab, SlotArray]] = field(default_factory=SimpleQueue)
    _thread: threading.Thread | None = None

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return uint8 memory of exactly `num_bytes`, with anything in it."""
        if num_bytes < LEAST_BYTES and self.pages is None:
            return torch.empty(num_bytes, dtype=torch.uint8)
        with self._lock:
            found = self._found(_units_of(num_bytes))
            if found is None:
                return HOST_MEMORY.take(num_bytes)
            slab, units = found
            self._look_ahead(slab, units)
        start = int(units[0]) * UNIT
        piece = slab.memory[start : start + num_bytes]
        # A tensor's storage holds this very array, and all views of the tensor hold the storage.
        weakref.finalize(piece, self._returned.append, (slab, units)).atexit = False
        return torch.from_numpy(piece)

    @property
    def num_slabs(self) -> int:
        """Slabs that are held."""
        return len(self._slabs)

    @property
    def held_bytes(self) -> int:
        """Memory of all slabs."""
        return sum(len(slab.memory) for slab in self._slabs)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies in memory of a slab."""
        address = tensor.data_ptr()
        # Without the lock, under which another thread may wait for a device: what a tensor views has a slab that stays.
        return any(0 <= address - slab.memory.ctypes.data < len(slab.memory) for slab in tuple(self._slabs))

    def has_room(self, num_bytes: int) -> bool:
        """Return whether a piece would lie in a slab now. Waits for the device if something has come back, as `take` does."""
        num_units = _units_of(num_bytes)
        with self._lock:
            self._take_back()
            if self.pages is None or (self.limit_bytes - self.held_bytes) // UNIT >= num_units:
                return True
            return any(slab.has_room(num_units) for slab in self._slabs)

    def _found(self, num_units: int) -> tuple[_Slab, SlotArray] | None:
        self._take_back()
        for slab in self._slabs:
            units = slab.take(num_units)
            if units is not None:
                return slab, units
        new = self._new_slab(num_units)
        if new is None:
            return None
        self._slabs.append(new)
        return new, new.free.take(num_units)

    def _new_slab(self, num_units: int) -> _Slab | None:
        """Make a slab with room for a piece; None if its pages cannot be locked, or may not be."""
        wanted = max(num_units, self.slab_bytes // UNIT)
        if self.pages is None:
            return _Slab.of(wanted)
        wanted = min(wanted, (self.limit_bytes - self.held_bytes) // UNIT)
        if wanted < num_units:
            return None
        slab = _Slab.of(wanted)
        address = slab.memory.ctypes.data
        try:
            self.pages.lock(address, len(slab.memory))
        except MemoryError as error:
            logger.warning("K/V are kept in memory that is not page-locked: %s", error)
            self.limit_bytes = self.held_bytes
            return None
        # Its pages are unlocked when the last piece of it has gone, and before the system takes them.
        weakref.finalize(slab.memory, self.pages.unlock, address).atexit = False
        return slab

    def _take_back(self) -> None:
        """Take what has come back; a slab of which nothing is used any more goes back to the system, if there is another."""
        returned = [self._returned.popleft() for _ in range(len(self._returned))]
        if returned and self.pages is not None:
            self.pages.settle()
        for slab, units in returned:
            slab.free.give_back(units)
        empty = [slab for slab in self._slabs if len(slab.free.slots()) * UNIT == len(slab.memory)]
        for slab in empty[1:]:
            self._slabs.remove(slab)

    def _look_ahead(self, slab: _Slab, units: SlotArray) -> None:
        """Have as many units touched as a next piece of this length needs after these, if they have not been."""
        stop = int(units[-1]) + 1
        slab.touched = max(slab.touched, stop)
        missing = stop + len(units) - slab.touched
        if missing <= 0 or not self.touches or self.pages is not None or not self._is_touching():
            return
        ahead = slab.free.take_at(slab.touched, missing)
        if not len(ahead):
            return
        slab.touched += len(ahead)
        self._wishes.put((slab, ahead))

    def _is_touching(self) -> bool:
        """Start the thread if there is none; False where the machine has no more of them."""
        if self._thread is None or not self._thread.is_alive():  # a forked process has no threads
            thread = threading.Thread(target=self._touch, name="kvgraft-host-memory", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return False
            self._thread = thread
        return True

    def _touch(self) -> None:
        """Write to every page of what is wished for, which is taken meanwhile, and give it back."""
        while True:
            slab, units = self._wishes.get()
            time.sleep(_REST_S)
            start, stop = int(units[0]) * UNIT, (int(units[-1]) + 1) * UNIT
            slab.memory[start:stop:_PAGE] = 0
            self.num_touched += len(units)
            self._returned.append((slab, units))


def _units_of(num_bytes: int) -> int:
    return max(1, -(-num_bytes // UNIT))


HOST_MEMORY = HostMemory()
"""That of this process."""


def page_locked_memory(limit_bytes: int, pages: PageLock) -> HostMemory:
    """Return memory of which at most `limit_bytes`, rounded up to whole units, are page-locked, as they are needed."""
    limit = -(-limit_bytes // UNIT) * UNIT
    return HostMemory(max(_SLAB_BYTES, limit // _SLABS_OF_LIMIT), pages=pages, limit_bytes=limit)
