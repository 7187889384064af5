"""Compare prompt and donor tokens one by one: what turns a guess of the anchor index into a run of equal tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvgraft.donors.arena import BLOCK_TOKENS, token_blocks
from kvgraft.donors.cover import cover
from kvgraft.donors.fingerprint import GRAM_TOKENS, Positions, Tokens
from kvgraft.donors.runs import Runs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvgraft.donors.arena import TokenArena

_COLUMNS = np.arange(BLOCK_TOKENS)

_BATCH_BLOCKS = 512
"""Blocks gathered at a time: 64 KiB, which stay in the processor's cache and in the allocator's."""

_FIRST_STEP = 64
"""Tokens by which a run is extended in the first round; rounds double it."""

_WORK_PER_TOKEN = 4
"""Comparisons per prompt token and round above which only runs that cover something are extended further."""


class Verifier:
    """Finds maximal runs of equal tokens around proposed intervals, for one prompt, all at once.

    Hashes are never trusted: every token of a run was compared.

    Attributes:
        num_tokens: Length of the prompt.
        num_compared: Token pairs compared so far.
    """

    def __init__(self, token_ids: Tokens, arena: TokenArena, *, lowest: int = 0) -> None:
        """Compare `token_ids[lowest:]` with the arena's text; runs do not reach below `lowest`."""
        self.num_tokens = len(token_ids)
        self._blocks = token_blocks(np.append(token_ids, np.zeros(BLOCK_TOKENS - 1, np.int32)))
        self._arena = arena
        self._lowest = lowest
        self.num_compared = 0

    def runs_in(self, proposals: Runs) -> Runs:
        """Return the runs of at least a k-gram inside `proposals`, extended as far as tokens are equal.

        Proposals may reach over the ends of prompt or donor and may be wrong.

        Complexity: O(tokens of `proposals`), and O(n log n) at most for the extension, however many there are.
        """
        lower, upper = self._bounds(proposals)
        inside = proposals._replace(starts=np.maximum(proposals.starts, lower), ends=np.minimum(proposals.ends, upper))
        is_long = inside.ends - inside.starts >= GRAM_TOKENS
        if not is_long.all():
            inside, lower, upper = inside.take(is_long), lower[is_long], upper[is_long]
        runs, origin = self._equal_parts(inside)
        open_left = (runs.starts == inside.starts[origin]) & (runs.starts > lower[origin])
        open_right = (runs.ends == inside.ends[origin]) & (runs.ends < upper[origin])
        if open_left.any() or open_right.any():
            self._extend(runs, open_left, open_right)
        return runs

    def _bounds(self, runs: Runs) -> tuple[Positions, Positions]:
        """Prompt positions at which donor or prompt begin and end."""
        first = self._arena.starts[runs.rows] - runs.diagonals
        lower = np.maximum(first, self._lowest)
        upper = np.minimum(first + self._arena.lengths[runs.rows], self.num_tokens)
        return lower, upper

    def _equal_parts(self, runs: Runs) -> tuple[Runs, Positions]:
        """Cut `runs` at unequal tokens; return pieces of a k-gram or more and the index of the run each is from."""
        offsets, total, unequal = self._unequal(runs.starts, runs.ends, runs.diagonals)
        # Pieces lie between cuts; starts and ends of pieces pair up in sorted order, empty pieces included.
        begins = np.sort(np.concatenate([offsets, unequal + 1]), kind="stable")
        ends = np.sort(np.concatenate([unequal, offsets[1:], [total]]), kind="stable")
        kept = ends - begins >= GRAM_TOKENS
        begins, ends = begins[kept], ends[kept]
        origin = np.searchsorted(offsets, begins, side="right") - 1
        shift = runs.starts[origin] - offsets[origin]
        return Runs(begins + shift, ends + shift, runs.diagonals[origin], runs.rows[origin]), origin

    def _unequal(self, starts: Positions, ends: Positions, diagonals: Positions) -> tuple[Positions, int, Positions]:
        """Compare intervals as if laid end to end: their offsets, the total length, ascending indices of inequality."""
        lengths = ends - starts
        offsets, total = _offsets(lengths)
        self.num_compared += total
        num_blocks = -(-lengths // BLOCK_TOKENS)
        first_block, all_blocks = _offsets(num_blocks)
        interval = np.repeat(np.arange(len(starts)), num_blocks)
        skipped = (np.arange(all_blocks) - first_block[interval]) * BLOCK_TOKENS
        target = starts[interval] + skipped
        differs = self._differs(target, target + diagonals[interval])
        # The last block of an interval reaches over its end.
        room = lengths[interval] - skipped
        last = np.flatnonzero(room < BLOCK_TOKENS)
        differs[last] &= room[last, None] > _COLUMNS
        block, column = np.divmod(np.flatnonzero(differs), BLOCK_TOKENS)
        return offsets, total, (offsets[interval] + skipped)[block] + column

    def _differs(self, target: Positions, source: Positions) -> NDArray[np.bool_]:
        """Compare the blocks from prompt positions `target` and arena indices `source` on: (blocks, BLOCK_TOKENS)."""
        differs = np.empty((len(target), BLOCK_TOKENS), np.bool_)
        for first in range(0, len(target), _BATCH_BLOCKS):
            batch = slice(first, first + _BATCH_BLOCKS)
            np.not_equal(self._blocks[target[batch]], self._arena.blocks[source[batch]], out=differs[batch])
        return differs

    def _extend(self, runs: Runs, open_left: NDArray[np.bool_], open_right: NDArray[np.bool_]) -> None:
        """Lengthen runs in place to the first unequal token on the open sides."""
        lower, upper = self._bounds(runs)
        step = _FIRST_STEP
        while num_open := int(np.count_nonzero(open_left) + np.count_nonzero(open_right)):
            if num_open * step > _WORK_PER_TOKEN * self.num_tokens:
                needed = np.zeros(runs.num_runs, np.bool_)
                needed[cover(runs.starts, runs.ends)] = True
                open_left &= needed
                open_right &= needed
            self._extend_right(runs, open_right, upper, step)
            self._extend_left(runs, open_left, lower, step)
            step *= 2

    def _extend_right(self, runs: Runs, is_open: NDArray[np.bool_], upper: Positions, step: int) -> None:
        index = np.flatnonzero(is_open)
        starts = runs.ends[index]
        ends = np.minimum(starts + step, upper[index])
        offsets, total, unequal = self._unequal(starts, ends, runs.diagonals[index])
        # The first inequality from the offset on, if it is in the interval.
        first = np.append(unequal, total)[np.searchsorted(unequal, offsets)]
        reached = np.minimum(starts + (first - offsets), ends)
        runs.ends[index] = reached
        is_open[index] = (reached == ends) & (ends < upper[index])

    def _extend_left(self, runs: Runs, is_open: NDArray[np.bool_], lower: Positions, step: int) -> None:
        index = np.flatnonzero(is_open)
        ends = runs.starts[index]
        starts = np.maximum(ends - step, lower[index])
        offsets, _, unequal = self._unequal(starts, ends, runs.diagonals[index])
        # The last inequality before the interval's end, if it is in the interval.
        stops = offsets + (ends - starts)
        last = np.append(-1, unequal)[np.searchsorted(unequal, stops)]
        reached = np.maximum(starts + (last + 1 - offsets), starts)
        runs.starts[index] = reached
        is_open[index] = (reached == starts) & (starts > lower[index])


def _offsets(lengths: Positions) -> tuple[Positions, int]:
    """Where intervals begin if laid end to end, and where the last one ends."""
    stops = np.cumsum(lengths)
    return stops - lengths, int(stops[-1]) if len(stops) else 0
