"""The window slots of one request, as data that `SlidingWindows` changes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class CapturedWindows:
    """K/V of window layers of positions `[start, stop)`, in the host store under `name`."""

    start: int
    stop: int
    name: str


@dataclass(slots=True, eq=False)
class WindowRow:
    """Window slots of one request.

    Attributes:
        swa_indices: int64, slot of each position, -1 where there is none; as long as the row of full slots. Written in place.
        prefix_len: Positions that came from the prefix cache.
        start: First position with a slot.
        stop: First position after `start` without one.
        registered_len: Positions below it are donors already, or never will be.
        captured: K/V that left the window since, on the host.
        is_donor: The request's text is to become a donor.
    """

    swa_indices: NDArray[np.int64]
    prefix_len: int
    start: int
    stop: int
    registered_len: int
    is_donor: bool
    captured: list[CapturedWindows] = field(default_factory=list)
