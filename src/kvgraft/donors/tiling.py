"""Choose disjoint pieces of runs that cover as much of the prompt as the runs do. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvgraft.donors.cover import distinct_heads, farthest_steps, undominated
from kvgraft.donors.runs import Runs

if TYPE_CHECKING:
    from kvgraft.donors.fingerprint import Positions


class _Piece(NamedTuple):
    start: int
    end: int
    run: int


def tile(runs: Runs, generations: Positions, *, min_run: int) -> Runs:
    """Cut overlapping runs into sorted, disjoint pieces of at least `min_run` tokens.

    Takes the fewest pieces that cover the union, always the run that reaches farthest. Of equal runs it takes the one
    that continues the piece before (same donor and diagonal, then same donor), then the lower generation, then the
    donor with most tokens in common. Where the next run would add less than `min_run`, it takes what it lacks from the
    piece before.

    Tokens of the union are left out only where a stretch of overlapping runs cannot be cut into pieces of `min_run`.

    Args:
        runs: At least `min_run` long each, any order, any number.
        generations: Generation of each run's donor.
        min_run: Shortest piece.

    Complexity: O(r log r) for r runs.
    """
    kept = undominated(runs.starts, runs.ends)
    runs, generations = runs.take(kept), generations[kept]
    heads = distinct_heads(runs.starts, runs.ends)
    stops = np.append(heads[1:], runs.num_runs)
    steps = farthest_steps(runs.starts[heads], runs.ends[heads])
    chosen = _choose(runs, generations, heads[steps].tolist(), stops[steps].tolist())
    return _pieces(runs.take(np.array(chosen, np.int64)), min_run)


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
        best = min(range(head, stop), key=cost)
        donor, diagonal = int(runs.rows[best]), int(runs.diagonals[best])
        chosen.append(best)
    return chosen


def _tokens_by_donor(runs: Runs) -> Positions:
    """For each run, the tokens that all runs of its donor have together."""
    _, index = np.unique(runs.rows, return_inverse=True)
    totals = np.zeros(runs.num_runs, np.int64)
    np.add.at(totals, index, runs.ends - runs.starts)
    return totals[index]


def _pieces(runs: Runs, min_run: int) -> Runs:
    """Trim overlaps of runs with ascending starts and ends."""
    starts = np.maximum(runs.starts, np.append(0, runs.ends)[:-1])
    if (runs.ends - starts < min_run).any():
        return _pieces_given_way(runs, min_run)
    return runs._replace(starts=starts)


def _pieces_given_way(runs: Runs, min_run: int) -> Runs:
    """Trim overlaps such that a piece that would get too short takes tokens from those before.

    Where they have none to spare, it replaces the one before if that covers more, or is left out.
    """
    run_starts = runs.starts.tolist()
    pieces: list[_Piece] = []
    for run, (start, end) in enumerate(zip(run_starts, runs.ends.tolist(), strict=True)):
        begin = max(start, pieces[-1].end) if pieces else start
        lacking = min_run - (end - begin)
        if lacking <= 0 or _give_way(pieces, run_starts, lacking, min_run):
            pieces.append(_Piece(begin - max(lacking, 0), end, run))
            continue
        begin = max(start, pieces[-2].end) if len(pieces) > 1 else start
        if end - begin > pieces[-1].end - pieces[-1].start:
            pieces[-1] = _Piece(begin, end, run)
    starts, ends, index = np.array(pieces, np.int64).reshape(-1, 3).T
    return Runs(starts, ends, runs.diagonals[index], runs.rows[index])


def _give_way(pieces: list[_Piece], run_starts: list[int], num_tokens: int, min_run: int) -> bool:
    """Move the end of the last piece `num_tokens` to the left, and pieces before it as far as it takes.

    False, and nothing changed, if they do not have so many tokens to spare.
    """
    moved: list[_Piece] = []
    for piece in reversed(pieces):
        spare = piece.end - piece.start - min_run
        lacking = max(0, num_tokens - spare)
        moved.append(piece._replace(start=piece.start - lacking, end=piece.end - num_tokens))
        if not lacking:
            pieces[-len(moved) :] = reversed(moved)
            return True
        if moved[-1].start < run_starts[piece.run]:
            return False
        num_tokens = lacking
    return False
