"""Learn then Test: which settings keep a risk, tried from the most conservative one on until the first that does not show it.

Angelopoulos et al., https://arxiv.org/abs/2110.01052, with fixed-sequence testing. Each setting is tested at the full
level `delta` because the order is fixed beforehand and testing ends at the first failure. Nothing is asked of the risk's
shape, which matters because it need not fall when more is computed again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def fixed_sequence(p_values: Sequence[float], delta: float) -> int:
    """Return how many settings, from the first on, are shown to keep the risk.

    With a probability of at least `1 - delta` all of them do.

    Args:
        p_values: In the order that was fixed before the data were seen, conservative first.
        delta: In (0, 1).
    """
    for index, p_value in enumerate(p_values):
        if p_value > delta:
            return index
    return len(p_values)
