"""The tokens of all donors in one array, so that any number of them is compared in one vectorised step."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.errors import CorruptCacheError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvgraft.donors.fingerprint import Positions, Tokens

_SCAN_PER_TOKEN = 5
"""Tokens of old text that are moved together per token stored."""

_ROOM = 1.75
"""Array length over token budget; the class docstring says why this is enough."""

BLOCK_TOKENS = 32
"""Tokens that are gathered together: one memory copy instead of as many look-ups."""


def token_blocks(token_ids: Tokens) -> NDArray[np.int32]:
    """Return a read-only view in which row i is `token_ids[i : i + BLOCK_TOKENS]`.

    What `numpy.lib.stride_tricks.sliding_window_view` gives, in a tenth of its time.
    """
    assert token_ids.flags.c_contiguous
    shape = (len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS)
    blocks = np.ndarray(shape, token_ids.dtype, token_ids, strides=2 * token_ids.strides)
    blocks.flags.writeable = False
    return blocks


class TokenArena:
    """Stores token sequences by row; sequences move, rows stay.

    New text goes to the head, and every store also slides some old text towards the front, in order of address and over
    the gaps of what was removed, so that no call pays for tidying up everything. When all text was visited, the head
    falls back to the end of what is packed.

    With budget B and five tokens visited per token stored, a pass that begins with head h ends after h / 4 tokens were
    stored and leaves at most B + h / 4 packed, so h <= 4/3 B and the head never passes 5/3 B.

    Invariants (verified by `check`):
        - Stored sequences are disjoint and below the head.
        - Packed sequences end at or below `_packed_end`; waiting ones begin at or above it, in order of address.

    Complexity: `store` of n tokens is O(n) plus the longest sequence it moves; `remove` is O(1).
    """

    def __init__(self, budget_tokens: int, max_rows: int) -> None:
        """Reserve room for `budget_tokens` in at most `max_rows` sequences; nothing is committed yet."""
        self.tokens: Tokens = np.empty(int(budget_tokens * _ROOM) + BLOCK_TOKENS, np.int32)
        """All rows, by arena index."""
        self.blocks = token_blocks(self.tokens)
        """`blocks[i]` are the `BLOCK_TOKENS` tokens from arena index i on."""
        self.starts: Positions = np.zeros(max_rows, np.int64)
        self.lengths: Positions = np.zeros(max_rows, np.int64)
        """Row r begins at arena index `starts[r]`, until the next `store`; a row that is not stored has length 0."""
        self._packed: deque[tuple[int, int]] = deque()
        self._waiting: deque[tuple[int, int]] = deque()
        self._packed_end = 0
        self._head = 0

    def store(self, row: int, token_ids: Tokens) -> None:
        """Copy `token_ids` under a row that is not in use. The owner keeps the sum of lengths within the budget."""
        assert self.lengths[row] == 0
        size = len(token_ids)
        self._tidy(_SCAN_PER_TOKEN * size)
        while self._head + size > len(self.blocks):
            self._tidy(len(self.blocks))
        self.tokens[self._head : self._head + size] = token_ids
        self.starts[row], self.lengths[row] = self._head, size
        self._waiting.append((row, self._head))
        self._head += size

    def remove(self, row: int) -> None:
        """Give a row's tokens up."""
        self.lengths[row] = 0

    def clear(self) -> None:
        """Give all rows up."""
        self.lengths[:] = 0
        self._packed.clear()
        self._waiting.clear()
        self._packed_end = self._head = 0

    def get(self, row: int) -> Tokens:
        """Return a view of a row's tokens, good until the next `store`."""
        return self.tokens[self.starts[row] : self.starts[row] + self.lengths[row]]

    def check(self) -> None:
        """Verify the invariants; raises `CorruptCacheError`."""
        rows = np.flatnonzero(self.lengths)
        rows = rows[np.argsort(self.starts[rows])]
        ends = self.starts[rows] + self.lengths[rows]
        if (ends[:-1] > self.starts[rows][1:]).any() or (ends > self._head).any():
            raise CorruptCacheError("token ranges of donors overlap or pass the head")
        waiting = [start for row, start in self._waiting if self._is_stored(row, start)]
        packed_ends = [start + int(self.lengths[row]) for row, start in self._packed if self._is_stored(row, start)]
        if waiting != sorted(waiting) or min(waiting, default=self._head) < self._packed_end:
            raise CorruptCacheError("token ranges that wait to be packed are out of order")
        if max(packed_ends, default=0) > self._packed_end or len(waiting) + len(packed_ends) != len(rows):
            raise CorruptCacheError("token ranges of donors are lost or not where they were packed")

    def _is_stored(self, row: int, start: int) -> bool:
        """Return whether a queue entry is still good: its row may be gone, or hold another sequence by now."""
        return bool(self.lengths[row]) and bool(self.starts[row] == start)

    def _tidy(self, budget: int) -> None:
        """Visit waiting sequences of `budget` tokens; begin a new pass after the last one."""
        while budget > 0 and self._waiting:
            row, start = self._waiting[0]
            if self._is_stored(row, start):
                budget -= self._pack(row)  # which takes it out
            else:
                self._waiting.popleft()
            budget -= 1
        if not self._waiting:
            self._head = self._packed_end
            self._packed, self._waiting = self._waiting, self._packed
            self._packed_end = 0

    def _pack(self, row: int) -> int:
        """Move the first row that waits to the end of what is packed; return its length."""
        start, size = int(self.starts[row]), int(self.lengths[row])
        target = self._packed_end
        if target != start:
            self.tokens[target : target + size] = self.tokens[start : start + size]
            self.starts[row] = target
        self._waiting.popleft()
        self._packed.append((row, target))
        self._packed_end += size
        return size
