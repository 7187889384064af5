"""Choose few intervals that cover what many cover. Pure arithmetic on starts and ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvgraft.donors.fingerprint import Positions


def undominated(starts: Positions, ends: Positions) -> Positions:
    """Return indices of the intervals that lie in no longer one, by ascending start (and so by ascending end).

    Of equal intervals all are returned, one after the other.

    Complexity: O(r log r), vectorised.
    """
    order = np.lexsort((-ends, starts))
    ordered_starts, ordered_ends = starts[order], ends[order]
    repeats = _repeats(ordered_starts, ordered_ends)
    is_leader = ~repeats
    farthest = np.maximum.accumulate(ordered_ends)
    is_leader[1:] &= ordered_ends[1:] > farthest[:-1]
    group = np.cumsum(~repeats) - 1
    kept_group = is_leader[~repeats]
    return order[kept_group[group]] if len(order) else order


def _repeats(starts: Positions, ends: Positions) -> NDArray[np.bool_]:
    """Mark intervals equal to the one before."""
    repeats = np.zeros(len(starts), np.bool_)
    repeats[1:] = (starts[1:] == starts[:-1]) & (ends[1:] == ends[:-1])
    return repeats


def distinct_heads(starts: Positions, ends: Positions) -> Positions:
    """Return the index of the first of every group of equal neighbours."""
    return np.flatnonzero(~_repeats(starts, ends))


def farthest_steps(starts: Positions, ends: Positions) -> list[int]:
    """Choose, left to right, the interval that reaches farthest from where the last one ended.

    Args:
        starts: Strictly ascending.
        ends: Strictly ascending.

    Returns:
        Ascending indices of the fewest intervals with the union of all.

    Complexity: O(r log r).
    """
    # From each interval to the last one that begins at or before its end, or over a gap to the next.
    reached = np.searchsorted(starts, ends, side="right") - 1
    following = np.maximum(reached, np.arange(1, len(starts) + 1)).tolist()
    chosen = []
    index = 0
    while index < len(following):
        chosen.append(index)
        index = following[index]
    return chosen


def cover(starts: Positions, ends: Positions) -> Positions:
    """Return indices of few intervals with the same union as all.

    Complexity: O(r log r).
    """
    kept = undominated(starts, ends)
    kept = kept[distinct_heads(starts[kept], ends[kept])]
    return kept[farthest_steps(starts[kept], ends[kept])]
