"""The reused tokens of a plan as policies see them."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.graft.select.base import SelectionContext
from kvgraft.graft.select.repeats import repeated

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvgraft.types import GraftPlan, Match

_NOTHING = np.empty(0, np.int64)


def selection_context(plan: GraftPlan, token_ids: NDArray[np.integer] | None = None) -> SelectionContext:
    """Lay out the tokens that `plan` moves from elsewhere; spans that continue one another in donor and prompt are one run.

    Exact spans are left out: computed again they would be the same. So are continued ones: what is approximate in them is so
    in all that the text was answered from before. `token_ids` seed policies that draw, and say what the prompt repeats.
    """
    positions, distances = [_NOTHING], [_NOTHING]
    run_start = 0
    previous: Match | None = None
    for span in plan.spans:
        if not span.is_shifted:
            continue
        if previous is None or not _continues(previous, span):
            run_start = span.target_start
        positions.append(np.arange(span.target_start, span.target_end))
        distances.append(positions[-1] - run_start)
        previous = span
    reused, distance = np.concatenate(positions), np.concatenate(distances)
    kept = ~np.isin(reused, plan.compute, assume_unique=True)
    if token_ids is None:
        return SelectionContext(plan.num_tokens, reused[kept], distance[kept], plan.compute)
    seed = zlib.crc32(np.ascontiguousarray(token_ids, np.int64).tobytes())
    is_repeated = repeated(token_ids, plan.shifted)[reused]
    return SelectionContext(
        plan.num_tokens, reused[kept], distance[kept], plan.compute, seed, reused[kept & is_repeated]
    )


def _continues(previous: Match, span: Match) -> bool:
    return (
        previous.donor_id == span.donor_id
        and previous.target_end == span.target_start
        and previous.position_delta == span.position_delta
    )
