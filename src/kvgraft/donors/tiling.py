"""Choose disjoint pieces of runs that cover as much of the prompt as the runs do. Pure."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.donors.cover import distinct_heads, farthest_steps, undominated
from kvgraft.donors.cuts import Piece, best, stretches, trimmed

if TYPE_CHECKING:
    from kvgraft.donors.fingerprint import Positions
    from kvgraft.donors.runs import Runs

_EXACT_TOKENS = 4096
"""Tokens of a prompt up to which hard stretches are cut in the best way, which takes about a microsecond each."""


def tile(runs: Runs, generations: Positions, *, min_run: int) -> Runs:
    """Cut overlapping runs into sorted, disjoint pieces of at least `min_run` tokens.

    Takes the fewest pieces that cover the union, always the run that reaches farthest. Where the next run would add less
    than `min_run`, it takes what it lacks from the piece before. A stretch of overlapping runs of which that leaves
    tokens out is cut in the best possible way, unless such stretches are very long. Of equal runs it takes the one
    that continues the piece before (same donor and diagonal, then same donor), then the lower generation, then the
    donor with most tokens in common.

    Args:
        runs: At least `min_run` long each, any order, any number.
        generations: Generation of each run's donor.
        min_run: Shortest piece.

    Complexity: O(r log r) for r runs.
    """
    kept = undominated(runs.starts, runs.ends)
    runs, generations = runs.take(kept), generations[kept]
    heads = distinct_heads(runs.starts, runs.ends)
    starts, ends, groups = _pieces(runs.starts[heads], runs.ends[heads], min_run)
    stops = np.append(heads[1:], runs.num_runs)
    chosen = _choose(runs, generations, heads[groups].tolist(), stops[groups].tolist())
    return runs.take(np.array(chosen, np.int64))._replace(starts=starts, ends=ends)


def _choose(runs: Runs, generations: Positions, heads: list[int], stops: list[int]) -> list[int]:
    """Choose one run of every group of equal runs `[head, stop)`."""
    if all(stop - head == 1 for head, stop in zip(heads, stops, strict=True)):
        return heads
    shared = _tokens_by_donor(runs)
    chosen: list[int] = []
    donor = diagonal = -1

    def cost(index: int) -> tuple[bool, bool, int, int]:
        row = int(runs.rows[index])
        is_neighbour = row == donor and int(runs.diagonals[index]) == diagonal
        return (not is_neighbour, row != donor, int(generations[index]), -int(shared[index]))

    for head, stop in zip(heads, stops, strict=True):
        best_run = head if stop - head == 1 else min(range(head, stop), key=cost)
        donor, diagonal = int(runs.rows[best_run]), int(runs.diagonals[best_run])
        chosen.append(best_run)
    return chosen


def _tokens_by_donor(runs: Runs) -> Positions:
    """For each run, the tokens that all runs of its donor have together."""
    _, index = np.unique(runs.rows, return_inverse=True)
    totals = np.zeros(runs.num_runs, np.int64)
    np.add.at(totals, index, runs.ends - runs.starts)
    return totals[index]


def _pieces(starts: Positions, ends: Positions, min_run: int) -> tuple[Positions, Positions, Positions]:
    """Cut runs with strictly ascending starts and ends: starts and ends of pieces, and the index of the run of each."""
    steps = np.array(farthest_steps(starts, ends), np.int64)
    begins = np.maximum(starts[steps], np.append(0, ends[steps])[:-1])
    if (ends[steps] - begins >= min_run).all():
        return begins, ends[steps], steps
    pieces = [
        Piece(piece.start, piece.end, int(steps[piece.number]))
        for piece in trimmed(starts[steps].tolist(), ends[steps].tolist(), min_run)
    ]
    begin, end, index = np.array(_improved(pieces, starts, ends, min_run), np.int64).reshape(-1, 3).T
    return begin, end, index


def _improved(pieces: list[Piece], starts: Positions, ends: Positions, min_run: int) -> list[Piece]:
    """Cut stretches of which `pieces` leave tokens out in the best way, as many as may be."""
    left, result = _EXACT_TOKENS, []
    remaining = deque(pieces)
    for first, stop in stretches(starts, ends):
        end = int(ends[stop - 1])
        own = []
        while remaining and remaining[0].end <= end:
            own.append(remaining.popleft())
        size = end - int(starts[first])
        if sum(piece.end - piece.start for piece in own) < size <= left:
            left -= size
            cut = best(starts[first:stop].tolist(), ends[first:stop].tolist(), min_run)
            own = [piece._replace(number=piece.number + first) for piece in cut]
        result += own
    return result
