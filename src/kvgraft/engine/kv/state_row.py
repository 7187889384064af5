"""The states of one request, as data that `RunningStates` changes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(slots=True, eq=False)
class StateRow:
    """Slots of states that one request holds.

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
