"""Runs in their own places before others: choose few that reach far, and fit what is left of the others between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvgraft.donors.runs import Runs

if TYPE_CHECKING:
    from numpy.typing import NDArray

_EVERYWHERE = 1 << 62
"""After the end of every prompt."""


def in_place_first(
    proved: Runs, is_stored: NDArray[np.bool_], pieces: Runs, *, start: int, min_run: int
) -> tuple[Runs, Runs]:
    """Return runs of `proved` and what stays of the others, disjoint, ascending, each of at least `min_run` tokens.

    The last proved one ends early enough to leave the piece across its end `min_run` tokens, so that none is lost.

    Args:
        proved: Runs that stand where the prompt has them, after its own tokens.
        is_stored: Of each, whether its K/V lie in stores alone; of two that reach equally far the resident one is taken.
        pieces: All runs, tiled: ascending and disjoint.
        start: First position that counts.
        min_run: Shortest run.

    Complexity: O(runs log runs + chosen runs * pieces).
    """
    chosen = _cover(proved, is_stored, start, min_run)
    if not chosen.num_runs:
        return chosen, pieces
    last = int(chosen.ends[-1])
    across = pieces.ends[(pieces.starts < last) & (pieces.ends > last)]
    chosen.ends[-1] = min([last, *(across - min_run)])
    chosen = chosen.take(chosen.ends - chosen.starts >= min_run)
    gaps = zip([start, *chosen.ends.tolist()], [*chosen.starts.tolist(), _EVERYWHERE], strict=True)
    others = Runs.empty()
    for low, high in gaps:
        others = others.joined(pieces.between(low, high, min_run))
    return chosen, others


def _cover(proved: Runs, is_stored: NDArray[np.bool_], start: int, min_run: int) -> Runs:
    """Choose runs, cut at their starts, that are disjoint and cover what all cover, but for less than `min_run` at a seam."""
    todo = np.argsort(proved.starts, kind="stable").tolist()
    reach = list(zip(proved.ends.tolist(), (~is_stored).tolist(), strict=True))
    chosen: list[int] = []
    starts: list[int] = []
    position, seen, best = start, 0, -1
    while True:
        while seen < len(todo) and proved.starts[todo[seen]] <= position:
            best = todo[seen] if best < 0 else max(best, todo[seen], key=lambda index: reach[index])
            seen += 1
        if best >= 0 and reach[best][0] - position >= min_run:
            chosen.append(best)
            starts.append(position)
            position = reach[best][0]
        elif seen < len(todo):
            position = int(proved.starts[todo[seen]])
        else:
            break
    return proved.take(np.array(chosen, np.int64))._replace(starts=np.array(starts, np.int64))
