"""What one request holds of layers that have slots of their own, as data that these layers' `LayerSlots` change."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    """Window slots of one request; `SlidingWindows` changes it.

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


@dataclass(slots=True, eq=False)
class StateRow:
    """Slots of states that one request holds; `RunningStates` changes it.

    Attributes:
        running: Slot of the state that its rows advance; None once it is among those recorded, or given back.
        num_tokens: Positions that the running state has read when the rows prepared last are computed.
        recorded_len: The last position that a state was recorded at, by this request or before it.
        due: Ascending positions after `num_tokens` at which states are to be recorded.
        is_stored: States are recorded, since what the request computes is to be stored.
        recorded: Slots of recorded states that are not stored yet, by the number of positions that each has read. A slot
            beyond what is computed waits for the pass that fills it.
    """

    running: int | None
    num_tokens: int
    recorded_len: int
    due: list[int]
    is_stored: bool
    recorded: dict[int, int] = field(default_factory=dict)

    @property
    def held(self) -> Iterator[int]:
        """All of these slots."""
        if self.running is not None:
            yield self.running
        yield from self.recorded.values()


LayerRow: TypeAlias = WindowRow | StateRow
