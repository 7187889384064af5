"""No reuse at all: the cache for engines with the prefix cache switched off. Requests own all of their slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.prefix.radix.base import BaseRadixCache
from kvgraft.prefix.radix.node import RadixNode
from kvgraft.prefix.results import NO_SLOTS, EvictResult
from kvgraft.windows import window_kind

if TYPE_CHECKING:
    from kvgraft.prefix.request import RequestRow


class ChunkCache(BaseRadixCache[RadixNode]):
    """A tree that is switched off: it stores nothing, chunks of a prefill stay with their request, every match is empty."""

    _node_class = RadixNode

    def __init__(self, page_size: int = 1) -> None:
        super().__init__(page_size, disabled=True, simulated=True)  # what it does not store needs no slots


class SWAChunkCache(ChunkCache):
    """Store nothing, but free window slots that a running request does not read any more."""

    def __init__(
        self,
        page_size: int = 1,
        *,
        sliding_window_size: int | None = None,
        attention_chunk_size: int | None = None,
    ) -> None:
        super().__init__(page_size)
        self.window = window_kind(sliding_window_size, attention_chunk_size)

    def advance_window(self, req: RequestRow) -> EvictResult:
        """Return window slots below the frontier. Complexity: O(tokens freed)."""
        frontier = self.window.frontier(req.committed_len, self.page_size)
        return EvictResult(NO_SLOTS, req.leave_windows(frontier))
