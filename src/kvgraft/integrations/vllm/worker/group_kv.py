"""Where the K/V of one group of layers lie while a graft is made, and how the reused ones get there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from kvgraft.graft.rope import RopeShift, RopeSpec
    from kvgraft.integrations.vllm.worker.layers import LayerGroup
    from kvgraft.integrations.vllm.worker.spans import ReusedSpans
    from kvgraft.integrations.vllm.worker.virtual_batch import BlockTable


class GroupKV(ABC):
    """The K/V of one request in the layers of one group.

    `first_layer` is the number of the group's first layer among all layers, group by group: the order of `KVBlock`s.
    """

    def __init__(
        self,
        group: LayerGroup,
        first_layer: int,
        rope: Sequence[RopeSpec | None],
        table: BlockTable,
        caches: Sequence[Tensor],
    ) -> None:
        self.group = group
        self.table = table
        self.caches = caches
        self._first_layer = first_layer
        self._rope = rope

    @abstractmethod
    def row_limit(self, first_row: int) -> int:
        """First position that cannot be computed in one pass with `first_row`."""

    @abstractmethod
    def prepare(self, spans: ReusedSpans, first_row: int, stop: int) -> None:
        """Bring in the reused K/V that rows in `[first_row, stop)` may attend to; ascending calls."""

    @abstractmethod
    def finish(self, spans: ReusedSpans, stop: int) -> None:
        """See to it that the request's own blocks hold what later passes attend to, up to position `stop`."""

    def read(self, positions: NDArray[np.int64]) -> list[tuple[Tensor, Tensor]]:
        """Per layer, keys and values `(num_positions, num_kv_heads, head_dim)` as they lie now."""
        slots = self._slots(positions)
        return [layer.read(cache, slots) for layer, cache in zip(self.group.layers, self.caches, strict=True)]

    def read_layer(self, number: int, positions: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, by its number among all layers."""
        index = number - self._first_layer
        return self.group.layers[index].read(self.caches[index], self._slots(positions))

    def _inject(self, spans: ReusedSpans, part: slice) -> None:
        """Store the reused K/V of `part`, keys rotated. O(layers * tokens)."""
        if part.start == part.stop:
            return
        slots = self._slots(spans.positions[part])
        shifts: dict[int, RopeShift | None] = {}
        for number, (layer, cache) in enumerate(zip(self.group.layers, self.caches, strict=True), self._first_layer):
            spec = self._rope[number]
            table = id(spec.inv_freq) if spec is not None else 0
            if table not in shifts:
                shifts[table] = spans.shift(part, spec)
            layer.write(cache, slots, spans.keys(number, part, shifts[table], spec), spans.values(number, part))

    def _slots(self, positions: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(self.table.slots(positions)).to(self.caches[0].device)


class PagedKV(GroupKV):
    """The request's own blocks: every position has one. Those in front of `start` may be shared and are only read."""

    def __init__(
        self,
        group: LayerGroup,
        first_layer: int,
        rope: Sequence[RopeSpec | None],
        table: BlockTable,
        caches: Sequence[Tensor],
        *,
        start: int,
    ) -> None:
        super().__init__(group, first_layer, rope, table, caches)
        self._start = start
        self._is_injected = False

    def row_limit(self, first_row: int) -> int:
        """No limit."""
        del first_row
        return np.iinfo(np.int64).max

    def prepare(self, spans: ReusedSpans, first_row: int, stop: int) -> None:
        """Inject everything, the first time."""
        del first_row, stop
        if not self._is_injected:
            self._is_injected = True
            self._inject(spans, slice(spans.between(0, self._start).stop, len(spans.positions)))

    def finish(self, spans: ReusedSpans, stop: int) -> None:
        """Inject if no row was computed."""
        self.prepare(spans, 0, stop)
