"""Where the K/V of one group of layers lie while a graft is made, and how the reused ones get there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvgraft.graft.executor import copy_spans

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from kvgraft.integrations.vllm.worker.layers import LayerGroup
    from kvgraft.integrations.vllm.worker.spans import DonorSpans
    from kvgraft.integrations.vllm.worker.virtual_batch import BlockTable


@dataclass(frozen=True, slots=True, eq=False)
class GroupPlace:
    """Chosen tokens of a group; see `KVPlace`. Layers have their numbers among all layers."""

    home: GroupKV
    slots: Tensor

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """See `KVPlace.read`."""
        index = layer - self.home.first_layer
        return self.home.group.layers[index].read(self.home.caches[index], self.slots)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """See `KVPlace.write`."""
        index = layer - self.home.first_layer
        self.home.group.layers[index].write(self.home.caches[index], self.slots, keys, values)


class GroupKV(ABC):
    """The K/V of one request in the layers of one group.

    `first_layer` is the number of the group's first layer among all layers, group by group: the order of `KVBlock`s.
    """

    def __init__(self, group: LayerGroup, first_layer: int, table: BlockTable, caches: Sequence[Tensor]) -> None:
        self.group = group
        self.first_layer = first_layer
        self.table = table
        self.caches = caches

    @property
    def layers(self) -> range:
        """Numbers of the group's layers among all layers."""
        return range(self.first_layer, self.first_layer + len(self.group.layers))

    @abstractmethod
    def row_limit(self, first_row: int) -> int:
        """First position that cannot be computed in one pass with `first_row`."""

    @abstractmethod
    def prepare(self, spans: DonorSpans, first_row: int, stop: int) -> None:
        """Bring in the reused K/V that rows in `[first_row, stop)` may attend to; ascending calls."""

    def inject_early(self, spans: DonorSpans) -> None:
        """Bring in reused K/V that have just arrived, where they have a place already; nothing otherwise."""
        del spans

    @abstractmethod
    def first_seen(self, row: int) -> int:
        """First position that the row at position `row` attends to; what lies in front of it may be gone."""

    @property
    @abstractmethod
    def longest_piece(self) -> int | None:
        """Positions, whichever they are, that lie here together with what they attend to; None for no limit."""

    @property
    @abstractmethod
    def forgets(self) -> bool:
        """Whether what a pass computed must be computed again by a later pass over rows further in front."""

    @abstractmethod
    def restart(self) -> None:
        """Prepare for a further pass, from the first row on; calls of `prepare` may begin in front again."""

    @abstractmethod
    def finish(self, spans: DonorSpans, stop: int) -> None:
        """See to it that the request's own blocks hold what later passes attend to, up to position `stop`."""

    def place(self, positions: NDArray[np.int64]) -> GroupPlace:
        """Where `positions` lie now."""
        return GroupPlace(self, torch.from_numpy(self.table.slots(positions)).to(self.caches[0].device))

    def _inject(self, spans: DonorSpans, start: int, stop: int) -> None:
        """Store the reused K/V of positions `[start, stop)`, keys rotated."""
        rotated = spans.between(start, stop)
        if rotated is not None:
            copy_spans(rotated, self.place(rotated.positions), self.layers)


class PagedKV(GroupKV):
    """The request's own blocks: every position has one. Those in front of `start` may be shared and are only read."""

    def __init__(
        self, group: LayerGroup, first_layer: int, table: BlockTable, caches: Sequence[Tensor], *, start: int
    ) -> None:
        super().__init__(group, first_layer, table, caches)
        self._injected = start

    def row_limit(self, first_row: int) -> int:
        """No limit."""
        del first_row
        return np.iinfo(np.int64).max

    def prepare(self, spans: DonorSpans, first_row: int, stop: int) -> None:
        """Inject everything that is there, once."""
        del first_row, stop
        end = spans.ready_end
        if end > self._injected:
            self._inject(spans, self._injected, end)
            self._injected = end

    def inject_early(self, spans: DonorSpans) -> None:
        """Inject them."""
        self.prepare(spans, 0, 0)

    def first_seen(self, row: int) -> int:
        """All of them."""
        del row
        return 0

    @property
    def longest_piece(self) -> int | None:
        """No limit."""
        return None

    @property
    def forgets(self) -> bool:
        """Nothing is forgotten."""
        return False

    def restart(self) -> None:
        """What is there stays."""

    def finish(self, spans: DonorSpans, stop: int) -> None:
        """Inject if no row was computed."""
        self.prepare(spans, 0, stop)
