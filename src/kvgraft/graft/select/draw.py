"""Draw reused tokens at random, the same ones for the same prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvgraft.graft.select.base import SelectionContext


def drawn(context: SelectionContext, count: int, weight: NDArray[np.floating] | None = None) -> NDArray[np.int64]:
    """Return ascending indices in `context.reused` of `count` tokens drawn without replacement. O(num_reused log num_reused).

    The seed of the context alone decides, so that neither a batch, a preemption nor another rank draws differently.

    Args:
        context: Of the prompt.
        count: At most as many as are reused.
        weight: One number >= 0 per reused token, to draw in proportion to; those of weight 0 come last. None: all alike.

    Source: for weights, Efraimidis and Spirakis, https://doi.org/10.1016/j.ipl.2005.11.003.
    """
    arrival = np.random.default_rng(context.seed).exponential(size=len(context.reused))
    if weight is not None:
        with np.errstate(divide="ignore"):
            arrival = np.where(weight > 0, arrival / weight, np.inf)
    return np.sort(np.argsort(arrival, kind="stable")[:count])
