"""Page-locking of host memory, so that a GPU copies from it beside the processor and at the full rate of its bus."""

from __future__ import annotations

from typing import Protocol

import torch


class PageLock(Protocol):
    """What memory that is used again needs of a device that reads it. Thread-safe."""

    def lock(self, address: int, num_bytes: int) -> None:
        """Lock pages; raises `MemoryError` if the system does not let it."""

    def unlock(self, address: int) -> None:
        """Unlock what was locked at an address. The device has read all of it."""

    def settle(self) -> None:
        """Wait until the device has carried out what it was asked to until now."""


class CudaPages:
    """Pages locked through CUDA's runtime, in memory of ours.

    PyTorch's own page-locked memory is not used for K/V that come and go: its allocator rounds every piece up to a power of
    two and keeps what was freed for pieces of that size alone, so that it takes up to twice what is in use, and that once
    more for every size (`ATen/core/CachingHostAllocator.h`, PyTorch 2.13). It keeps a piece until the device has read it;
    here `settle` does. Never run on a GPU by us.
    """

    def lock(self, address: int, num_bytes: int) -> None:
        """See `PageLock`."""
        code = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))
        if code:
            raise MemoryError(f"CUDA does not lock {num_bytes} bytes of host memory (error {code})")

    def unlock(self, address: int) -> None:
        """See `PageLock`."""
        torch.cuda.cudart().cudaHostUnregister(address)

    def settle(self) -> None:
        """Wait for all streams of all devices that this process uses."""
        for device in range(torch.cuda.device_count()):
            if torch.cuda.memory_reserved(device):
                torch.cuda.synchronize(device)
