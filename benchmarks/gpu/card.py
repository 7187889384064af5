"""A device as measurements need it: its memory, its bandwidth, and work that is timed until it is done."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvgraft.config import available_memory

if TYPE_CHECKING:
    from collections.abc import Callable

_WARM_UP = 2
_LARGEST_BUFFER = {True: 1 << 30, False: 1 << 26}
"""On a GPU, and elsewhere: several times what caches hold."""
_SMALLEST_BUFFER = 1 << 22
_SHARE_OF_FREE = 32
"""A buffer takes this part of the free memory at most: there are two, and the model lies beside them."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Medians over rounds.

    Attributes:
        seconds: Until the device is done.
        queued_s: Until the processor has queued the work; the same where nothing works beside it.
        rounds: How many.
    """

    seconds: float
    queued_s: float
    rounds: int


class Card:
    """One device. On a processor, queued work is done work."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"

    @property
    def name(self) -> str:
        """What it is called."""
        return torch.cuda.get_device_name(self.device) if self.is_cuda else "processor"

    @property
    def free_bytes(self) -> int:
        """Memory that can still be taken."""
        if not self.is_cuda:
            return available_memory()
        kept = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return torch.cuda.mem_get_info(self.device)[0] + kept

    def describe(self) -> dict[str, object]:
        """Return what is needed to compare figures of two cards."""
        if not self.is_cuda:
            return {"name": self.name}
        found = torch.cuda.get_device_properties(self.device)
        return {
            "name": self.name,
            "memory_bytes": found.total_memory,
            "capability": f"{found.major}.{found.minor}",
            "cuda": torch.version.cuda,
            "tf32": torch.backends.cuda.matmul.allow_tf32,
        }

    def finish(self) -> None:
        """Wait until everything that was queued is done."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def timed(self, work: Callable[[], object], *, rounds: int, budget_s: float = float("inf")) -> Timing:
        """Do `work` twice unmeasured, then `rounds` times, fewer if `budget_s` is used up; once at least."""
        for _ in range(_WARM_UP):
            work()
        self.finish()
        times: list[tuple[float, float]] = []
        ends = time.perf_counter() + budget_s
        while not times or (len(times) < rounds and time.perf_counter() < ends):
            started = time.perf_counter()
            work()
            queued = time.perf_counter()
            self.finish()
            times.append((time.perf_counter() - started, queued - started))
        seconds, queued_s = (statistics.median(column) for column in zip(*times, strict=True))
        return Timing(seconds, queued_s, len(times))

    def bandwidth(self, *, rounds: int) -> dict[str, float]:
        """Return GB/s of copies within the device, bytes read and written counted, and between it and page-locked memory."""
        size = max(_SMALLEST_BUFFER, min(_LARGEST_BUFFER[self.is_cuda], self.free_bytes // _SHARE_OF_FREE))
        there, here = (torch.zeros(size, dtype=torch.uint8, device=self.device) for _ in range(2))
        host = torch.zeros(size, dtype=torch.uint8, pin_memory=self.is_cuda)

        def rate(target: torch.Tensor, source: torch.Tensor, passes: int) -> float:
            timing = self.timed(lambda: target.copy_(source, non_blocking=True), rounds=rounds)
            return gb_per_s(passes * size, timing.seconds)

        return {
            "device_gb_s": rate(here, there, 2),
            "from_host_gb_s": rate(here, host, 1),
            "to_host_gb_s": rate(host, here, 1),
        }


def gb_per_s(num_bytes: float, seconds: float) -> float:
    """Return 10^9 bytes per second."""
    return num_bytes / max(seconds, 1e-9) / 1e9
