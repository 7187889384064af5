"""Copies computed text from a GPU into host memory, without holding the engine up. Loaded there alone.

The gather runs on the engine's own stream, into a ring of device memory of ours: it is over before all that the engine queues
later, so that blocks which are freed, preempted or written again need no care. A second stream copies from the ring to its
page-locked half, one copy per piece of text, and a thread moves that into the memory of donors when the copy has arrived. A
range of the ring is used again when its text has left it, never before. Never run on a GPU by us.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import torch

from kvgraft.integrations.vllm.worker.host_reader import TextCopy, TextReader, fill, layout_of
from kvgraft.memory.host_memory import HOST_MEMORY
from kvgraft.memory.packed import PackedLayout, packed

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from kvgraft.integrations.vllm.worker.group_kv import GroupKV
    from kvgraft.memory.block import KVBlock
    from kvgraft.memory.host_memory import HostMemory

RING_BYTES = 256 << 20
"""Text on its way, on the device and page-locked beside it: 2,048 tokens of a model of 8B in bfloat16."""
_PIECES_OF_RING = 4
"""A text is copied in pieces of at most this part of the ring, so that room comes back while the rest is on its way."""
_ALIGNED = 64


class CopyEvent(Protocol):
    """The end of a copy."""

    def synchronize(self) -> None:
        """Wait for it; other threads run meanwhile."""


class CopyDevice(Protocol):
    """What a reader needs of a device that works beside the processor."""

    def ring(self, num_bytes: int) -> tuple[Tensor, Tensor]:
        """Allocate uint8 memory on the device, and page-locked memory of the same size."""

    def copy(self, source: Tensor, target: Tensor) -> CopyEvent:
        """Queue a copy to the host after all that the engine's stream has got so far; return its end without waiting."""


class CudaCopies:
    """Copies on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def ring(self, num_bytes: int) -> tuple[Tensor, Tensor]:
        """See `CopyDevice`."""
        return (
            torch.empty(num_bytes, dtype=torch.uint8, device=self._device),
            torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True),
        )

    def copy(self, source: Tensor, target: Tensor) -> CopyEvent:
        """See `CopyDevice`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            copied = torch.cuda.Event(blocking=True)  # the thread sleeps instead of spinning
            copied.record(self._stream)
        return copied


class StagedReader(TextReader):
    """Gathers into a ring on the device, from which a second stream and a thread take it to host memory.

    Invariants:
        - Ranges of the ring are taken and given back in one order; one is free when its text has left the host's half, too.
        - Only the thread reads the host's half, after the event of its copy.
    """

    def __init__(self, device: CopyDevice, ring_bytes: int = RING_BYTES, memory: HostMemory = HOST_MEMORY) -> None:
        """Take a device, the size of both halves of the ring, and the memory in which text lies afterwards."""
        self._memory = memory
        self.thread = ThreadPoolExecutor(1, "kvgraft-capture")
        self.num_waits = 0
        self._copies = device
        self._on_device, self._on_host = device.ring(ring_bytes)
        self._taken: deque[tuple[int, int, Future[KVBlock]]] = deque()

    def read(self, homes: Sequence[GroupKV], positions: NDArray[np.int64]) -> list[TextCopy]:
        """See `TextReader.read`. Waits only where the ring is full of text that has not left it."""
        layout = layout_of(homes)
        limit = len(self._on_device) // _PIECES_OF_RING
        most = max(1, limit // layout.bytes_per_token)
        pieces = [positions[start : start + most] for start in range(0, len(positions), most)]
        return [self._piece(layout, homes, piece) for piece in pieces]

    def _piece(self, layout: PackedLayout, homes: Sequence[GroupKV], positions: NDArray[np.int64]) -> TextCopy:
        num_bytes = len(positions) * layout.bytes_per_token
        start = self._room(num_bytes)
        on_device, on_host = (half[start : start + num_bytes] for half in (self._on_device, self._on_host))
        fill(layout.view(on_device, len(positions)), homes, positions)
        copied = self._copies.copy(on_device, on_host)
        landed = self.thread.submit(_landed, layout.view(on_host, len(positions)), copied, self._memory)
        self._taken.append((start, start + num_bytes, landed))
        return TextCopy(num_bytes, landed)

    def _room(self, num_bytes: int) -> int:
        """Return the start of a free range of the ring, from the end of the last one on or from its beginning."""
        if num_bytes > len(self._on_device):
            raise MemoryError(f"a token of {num_bytes} bytes does not fit the ring of {len(self._on_device)}")
        while True:
            while self._taken and self._taken[0][2].done():
                self._taken.popleft()
            start = self._free_start(num_bytes)
            if start is not None:
                return start
            self.num_waits += 1
            self._taken[0][2].exception()  # waits; the error is the part's

    def _free_start(self, num_bytes: int) -> int | None:
        if not self._taken:
            return 0
        oldest, newest = self._taken[0][0], self._taken[-1][1]
        start = -(-newest // _ALIGNED) * _ALIGNED
        if oldest < newest:  # taken is one run: free are what is after it, and what is before
            if start + num_bytes <= len(self._on_device):
                return start
            start = 0
        return start if start + num_bytes <= oldest else None


def _landed(staged: KVBlock, copied: CopyEvent, memory: HostMemory) -> KVBlock:
    """Return a copy of what has arrived in the ring, once it has."""
    copied.synchronize()
    return packed([staged], memory)
