"""A device that counts page-locked memory, and reads host memory later than it is told to."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class PageLedger:
    """Page-locked memory by address; `most` is the largest sum so far, `num_waits` how often copies were waited for."""

    locked: dict[int, int] = field(default_factory=dict)
    most: int = 0
    num_waits: int = 0
    is_refused: bool = False

    def lock(self, address, num_bytes):
        if self.is_refused:
            raise MemoryError("no more pages can be locked")
        self.locked[address] = num_bytes
        self.most = max(self.most, self.total)

    def unlock(self, address):
        del self.locked[address]

    def settle(self):
        self.num_waits += 1

    @property
    def total(self):
        return sum(self.locked.values())
