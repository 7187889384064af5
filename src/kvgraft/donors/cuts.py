"""Cut overlapping intervals into pieces of a least length: quickly, and as well as it can be done. Pure arithmetic."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgraft.donors.fingerprint import Positions


class Piece(NamedTuple):
    """Positions `[start, end)` of interval `number`."""

    start: int
    end: int
    number: int


def stretches(starts: Positions, ends: Positions) -> list[tuple[int, int]]:
    """Group intervals with ascending starts and ends that overlap or touch: first and end index of each group."""
    heads = np.flatnonzero(np.append(True, starts[1:] > ends[:-1])).tolist() if len(starts) else []
    return list(zip(heads, [*heads[1:], len(starts)], strict=True))


def trimmed(starts: Sequence[int], ends: Sequence[int], min_length: int) -> list[Piece]:
    """Trim overlaps; a piece that would get too short takes positions from those before.

    Where they have none to spare, it replaces the one before if that covers more, or is left out.

    Args:
        starts: Ascending.
        ends: Ascending; every interval is at least `min_length` long.
        min_length: Shortest piece.

    Complexity: O(r) for r intervals, unless many take from one another.
    """
    pieces: list[Piece] = []
    for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
        begin = max(start, pieces[-1].end) if pieces else start
        lacking = min_length - (end - begin)
        if lacking <= 0 or _give_way(pieces, starts, lacking, min_length):
            pieces.append(Piece(begin - max(lacking, 0), end, index))
            continue
        begin = max(start, pieces[-2].end) if len(pieces) > 1 else start
        if end - begin > pieces[-1].end - pieces[-1].start:
            pieces[-1] = Piece(begin, end, index)
    return pieces


def _give_way(pieces: list[Piece], starts: Sequence[int], num_positions: int, min_length: int) -> bool:
    """Move the end of the last piece `num_positions` to the left, and pieces before it as far as it takes.

    False, and nothing changed, if they do not have so many to spare.
    """
    moved: list[Piece] = []
    for piece in reversed(pieces):
        spare = piece.end - piece.start - min_length
        lacking = max(0, num_positions - spare)
        moved.append(Piece(piece.start - lacking, piece.end - num_positions, piece.number))
        if not lacking:
            pieces[-len(moved) :] = reversed(moved)
            return True
        if moved[-1].start < starts[piece.number]:
            return False
        num_positions = lacking
    return False


def best(starts: Sequence[int], ends: Sequence[int], min_length: int) -> list[Piece]:
    """Choose disjoint pieces of at least `min_length`, each in one interval, that cover as much as any choice does.

    Dynamic programming over the end of the last piece: it begins where what is covered before it, less what it gives
    up by beginning later, is most.

    Args:
        starts: Strictly ascending.
        ends: Strictly ascending; the intervals make one stretch.
        min_length: Shortest piece.

    Complexity: O(positions).
    """
    lowest = starts[0]
    covered = [0] * (ends[-1] - lowest + 1)
    chosen: list[Piece | None] = [None] * len(covered)
    candidates: deque[int] = deque()
    index, entered = 0, lowest
    for end in range(lowest + 1, ends[-1] + 1):
        covered[end - lowest] = covered[end - lowest - 1]
        while ends[index] < end:
            index += 1
        last = end - min_length
        while entered <= last:
            gain = covered[entered - lowest] - entered
            while candidates and covered[candidates[-1] - lowest] - candidates[-1] < gain:
                candidates.pop()
            candidates.append(entered)
            entered += 1
        while candidates and candidates[0] < starts[index]:
            candidates.popleft()
        if candidates:
            begin = candidates[0]
            total = covered[begin - lowest] + end - begin
            if total > covered[end - lowest]:
                covered[end - lowest] = total
                chosen[end - lowest] = Piece(begin, end, index)
    return _traced(chosen, lowest)


def _traced(chosen: Sequence[Piece | None], lowest: int) -> list[Piece]:
    """Follow the last piece of each end from the highest end back."""
    pieces: list[Piece] = []
    end = len(chosen) - 1
    while end > 0:
        piece = chosen[end]
        if piece is None:
            end -= 1
            continue
        pieces.append(piece)
        end = piece.start - lowest
    return pieces[::-1]
