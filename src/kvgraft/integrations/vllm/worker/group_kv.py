"""Homes of a request's K/V while a graft is made, one per group of layers, and the injection of reused K/V into them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvgraft.graft.executor import copy_spans
from kvgraft.integrations.vllm.worker.virtual_batch import BlockTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from kvgraft.integrations.vllm.worker.attention_layer import AttentionLayer
    from kvgraft.integrations.vllm.worker.layers import LayerGroup
    from kvgraft.integrations.vllm.worker.spans import DonorSpans

_NO_LIMIT = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, eq=False)
class GroupPlace:
    """Chosen tokens of a group; see `KVPlace`. Layers have their numbers among all layers."""

    home: GroupKV
    slots: Tensor

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """See `KVPlace.read`."""
        return self.layer(layer).read(self._cache(layer), self.slots)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """See `KVPlace.write`."""
        self.layer(layer).write(self._cache(layer), self.slots, keys, values)

    def layer(self, number: int) -> AttentionLayer:
        """Return the layer with this number among all."""
        return self.home.group.layers[number - self.home.group.first_layer]

    def _cache(self, number: int) -> Tensor:
        return self.home.caches[number - self.home.group.first_layer]


class GroupKV(ABC):
    """The K/V of one request in the layers of one group.

    `longest_piece` positions, in any place, lie here together with what they attend to; None for no limit.
    """

    longest_piece: int | None = None

    def __init__(self, group: LayerGroup, table: BlockTable, caches: Sequence[Tensor]) -> None:
        self.group = group
        self.table = table
        self.caches = caches

    @property
    def layers(self) -> range:
        """Numbers of the group's layers among all layers."""
        return range(self.group.first_layer, self.group.first_layer + len(self.group.layers))

    @abstractmethod
    def prepare(self, spans: DonorSpans, first_row: int, stop: int) -> None:
        """Bring in the reused K/V that rows in `[first_row, stop)` may attend to; ascending calls."""

    @abstractmethod
    def finish(self, spans: DonorSpans, stop: int) -> None:
        """Complete what later passes attend to in the request's own blocks, up to position `stop`."""

    def inject_early(self, spans: DonorSpans) -> None:
        """Bring in reused K/V that have just arrived, if they have a place already."""
        del spans

    def row_limit(self, first_row: int) -> int:
        """Return the first position that cannot be computed in one pass with `first_row`."""
        del first_row
        return _NO_LIMIT

    def first_seen(self, row: int) -> int:
        """Return the first position that the row at position `row` attends to; earlier ones may be gone."""
        del row
        return 0

    @abstractmethod
    def restart(self) -> None:
        """Prepare for a further pass, from the first row on; calls of `prepare` may begin at the first position again."""

    def place(self, positions: NDArray[np.int64]) -> GroupPlace:
        """Return the present place of `positions`."""
        return GroupPlace(self, torch.from_numpy(self.table.slots(positions)).to(self.caches[0].device))

    def _inject(self, spans: DonorSpans, start: int, stop: int) -> None:
        """Store the reused K/V of positions `[start, stop)`, keys rotated."""
        rotated = spans.between(start, stop)
        if rotated is not None:
            copy_spans(rotated, self.place(rotated.positions), self.layers)


class PagedKV(GroupKV):
    """The request's own blocks: every position has one. Those before `start` may be shared and are only read."""

    def __init__(self, group: LayerGroup, table: BlockTable, caches: Sequence[Tensor], *, start: int) -> None:
        super().__init__(group, table, caches)
        self._injected = start

    @classmethod
    def of(cls, group: LayerGroup, blocks: NDArray[np.int32], *, start: int) -> PagedKV:
        """Return the K/V in vLLM's paged cache of a request that has `blocks`."""
        table = BlockTable(group.own_blocks(blocks), group.block_size)
        return cls(group, table, [layer.cache for layer in group.layers], start=start)

    @classmethod
    def scratch(cls, group: LayerGroup, blocks: NDArray[np.int32]) -> PagedKV:
        """Return K/V in blocks of our own with the numbers `blocks`."""
        caches = [layer.scratch(int(blocks.max()) + 1) for layer in group.layers]
        return cls(group, BlockTable(blocks, group.block_size), caches, start=0)

    def prepare(self, spans: DonorSpans, first_row: int, stop: int) -> None:
        """Inject everything that has arrived, once."""
        del first_row, stop
        self.inject_early(spans)

    def inject_early(self, spans: DonorSpans) -> None:
        """Inject everything that has arrived, once."""
        end = spans.ready_end
        if end > self._injected:
            self._inject(spans, self._injected, end)
            self._injected = end

    def restart(self) -> None:
        """Keep everything."""

    def finish(self, spans: DonorSpans, stop: int) -> None:
        """Inject if no row was computed."""
        del stop
        self.inject_early(spans)
