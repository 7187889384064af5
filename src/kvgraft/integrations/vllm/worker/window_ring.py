"""K/V of sliding-window layers around the rows that are being computed.

vLLM gives a request blocks for the window before its computed tokens alone, so earlier gaps have nowhere to be computed. They
are computed in blocks of our own: a ring in which a position's block is its block number modulo the size of the ring. Rows
are computed in ascending order, a row attends to the window that ends with it, and older positions are overwritten. At the
end the last window is copied to the request's blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from kvgraft.integrations.vllm.worker.group_kv import GroupKV
from kvgraft.integrations.vllm.worker.virtual_batch import BlockTable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvgraft.integrations.vllm.worker.layers import LayerGroup
    from kvgraft.integrations.vllm.worker.spans import DonorSpans


class WindowRing(GroupKV):
    """A ring of `ceil((window + max_rows) / block_size) + 1` blocks per layer, or fewer for a short prompt.

    Invariant: after a call of `prepare`, all positions in `[max(0, first_row - window + 1), first_row)` are in the ring.
    A ring shorter than the prompt holds `max_rows` rows with all that they attend to.
    """

    def __init__(self, group: LayerGroup, blocks: NDArray[np.int32], *, max_rows: int, start: int) -> None:
        """Allocate the ring for a request with `blocks`, 0 where vLLM keeps none; those before `start` may be shared."""
        blocks = group.own_blocks(blocks)
        size = min(-(-(group.window + max_rows) // group.block_size) + 1, len(blocks))
        table = BlockTable(np.arange(len(blocks), dtype=np.int32) % size, group.block_size)
        super().__init__(group, table, [layer.scratch(size) for layer in group.layers])
        self._own = BlockTable(blocks, group.block_size)
        self._num_blocks = size
        self._filled, self._start = 0, start
        self.longest_piece = max_rows if size < len(blocks) else None

    def row_limit(self, first_row: int) -> int:
        """Keep the blocks from the first row's window on from meeting themselves in the ring."""
        size = self.group.block_size
        return (self.first_seen(first_row) // size + self._num_blocks) * size

    def prepare(self, spans: DonorSpans, first_row: int, stop: int) -> None:
        """Inject what lies in the windows of the rows and is not there yet."""
        start = max(self.first_seen(first_row), self._filled)
        self._inject(spans, start, stop)
        self._filled = max(self._filled, stop)

    def first_seen(self, row: int) -> int:
        """Return the first position of the row's window."""
        return max(0, row - self.group.window + 1)

    def restart(self) -> None:
        """Fill the ring anew."""
        self._filled = 0

    def finish(self, spans: DonorSpans, stop: int) -> None:
        """Complete the last window and copy it to the request's blocks; that of the exact prefix stays, which others read."""
        self.prepare(spans, stop, stop)
        positions = np.arange(max(self.first_seen(stop), self._start), stop)
        positions = positions[self._own.blocks[positions // self.group.block_size] != 0]
        if not len(positions):
            return
        ring, slots = self.place(positions), torch.from_numpy(self._own.slots(positions)).to(self.caches[0].device)
        for number, layer in zip(self.layers, self.group.layers, strict=True):
            layer.write(layer.cache, slots, *ring.read(number))
