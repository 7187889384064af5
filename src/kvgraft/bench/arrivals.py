"""When requests are sent: recorded times brought to a rate, a Poisson process, or by clients that wait for their answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Load:
    """How requests come: `rate` per second, earlier ones answered or not, or from `clients`, each with one at a time."""

    rate: float = 0.0
    clients: int = 0

    def __str__(self) -> str:
        return f"c={self.clients}" if self.clients else f"{self.rate:.3g}/s"


def arrival_times(recorded: Sequence[float] | None, count: int, rate: float, seed: int) -> NDArray[np.float64]:
    """Give `count` ascending times in seconds, the first at 0, of `rate` per second on average.

    Args:
        recorded: Times of a pack, of which the first `count` keep their pattern; None draws a Poisson process.
        count: Arrivals.
        rate: Arrivals per second.
        seed: Of the Poisson process. Equal seeds give the same pattern at every rate, only faster.
    """
    pattern = _poisson(count, seed) if recorded is None else np.sort(np.asarray(recorded[:count], np.float64))
    pattern -= pattern[:1]
    span = pattern[-1] if count else 0.0
    if count < 2:
        return pattern
    if span == 0:  # all recorded at one moment: that is no pattern
        return arrival_times(None, count, rate, seed)
    return pattern * ((count - 1) / rate / span)


def _poisson(count: int, seed: int) -> NDArray[np.float64]:
    return np.cumsum(np.random.default_rng(seed).exponential(1.0, count))
