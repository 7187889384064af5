"""How long this server takes to compute a prompt, from prompts that it has computed."""

from __future__ import annotations

from collections import deque
from statistics import median

_REMEMBERED = 9
_FEWEST_TOKENS = 64
"""Shorter prefills say how long a step takes, not a token."""


class PrefillSpeed:
    """Seconds per unit of the `CostModel`: the median of the last prefills, as their requests saw them. Not thread-safe."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_REMEMBERED)

    def observe(self, num_tokens: int, cost: float, seconds: float) -> None:
        """Take over a prefill.

        Args:
            num_tokens: That were computed.
            cost: Of computing them.
            seconds: From admission to the last token's output.
        """
        if num_tokens >= _FEWEST_TOKENS and cost > 0:
            self._recent.append(seconds / cost)

    def seconds(self, cost: float) -> float | None:
        """Expected seconds of a cost; None before anything was observed."""
        return median(self._recent) * cost if self._recent else None
