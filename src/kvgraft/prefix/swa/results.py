"""Results of a cache of two pools."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.prefix.results import NO_SLOTS, InsertResult, MatchResult, SlotArray, join_slots

if TYPE_CHECKING:
    from kvgraft.prefix.swa.node import SWANode


class SWAMatchResult(MatchResult):
    """A match with the slots of both pools."""

    __slots__ = ("_path",)

    def __init__(self, path: list[SWANode], handle: SWANode) -> None:
        super().__init__([node.kv_indices for node in path], handle.end, handle)
        self._path = [(len(node), None if node.component is None else node.component.swa_indices) for node in path]

    @property
    def swa_indices(self) -> SlotArray:
        """Int64 `(prefix_len,)` slots of the sliding-window pool, -1 where they are gone. Complexity: O(prefix_len)."""
        return join_slots([np.full(length, -1) if slots is None else slots for length, slots in self._path])


@dataclass(frozen=True, slots=True, eq=False)
class SWAInsertResult(InsertResult):
    """The offered slots that the cache took, and those that are duplicates."""

    freed: SlotArray = field(default_factory=lambda: NO_SLOTS)
    """Offered full-attention slots of `[prev_prefix_len, prefix_len)`: the cache keeps its own."""
    swa_freed: SlotArray = field(default_factory=lambda: NO_SLOTS)
    """Offered sliding-window slots there that healed no tombstone."""
