"""Slots of layers that have slots of their own: the interface, and its behaviour where all share one slot per token."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvgraft.engine.kv.kept_prefixes import PrefixLock
    from kvgraft.engine.kv.request_kv import RequestKV
    from kvgraft.engine.kv.state_row import StateRow
    from kvgraft.engine.kv.window_row import WindowRow
    from kvgraft.prefix import MatchResult


class LayerSlots:
    """Takes requests' slots of layers that have slots of their own, and gives them back; here there are no such layers.

    `SlidingWindows` is for models with window layers, `RunningStates` for those with layers that keep a state. Not
    thread-safe.

    Attributes:
        num_errors: Captures for donors that failed; the text in question does not become a donor.
        longest_piece: Rows of one sequence that always have room if it runs alone; None for any number.
        can_rewind: Positions that were computed can be computed again.
    """

    num_errors: int = 0
    longest_piece: int | None = None
    can_rewind: bool = True

    def adopt(
        self, match: MatchResult | None, lock: PrefixLock | None, num_tokens: int, *, is_stored: bool, is_donor: bool
    ) -> WindowRow | StateRow | None:
        """Return what a request holds that begins with its exact prefix; None where there is nothing to hold.

        Args:
            match: The prefix; None where none was looked for.
            lock: On the prefix.
            num_tokens: Of the prompt.
            is_stored: What the request computes is to be stored as a prefix.
            is_donor: Its text is to become a donor.

        Raises:
            CapacityError: There is no room to begin with.
        """
        return None

    def widen(self, kv: RequestKV) -> None:
        """Follow `kv.kv_indices` when it has grown."""

    def require_room(self, kv: RequestKV, num_tokens: int) -> None:
        """Raise `CapacityError` unless the request can begin to compute `num_tokens` positions."""

    def fill(self, kv: RequestKV, num_tokens: int) -> None:
        """Take slots for all positions up to `num_tokens`, for a graft.

        Raises:
            CapacityError: There are not enough.
        """

    def reserve(self, kv: RequestKV, positions: NDArray[np.int64]) -> int:
        """Prepare the rows at `positions`, ascending; returns how many of them are to be computed now, maybe none."""
        return len(positions)

    def grow(self, kv: RequestKV, num_tokens: int) -> None:
        """Prepare the rows up to `num_tokens` positions; all after the present ones are computed.

        Raises:
            CapacityError: There are not enough slots.
        """

    def advance(self, kv: RequestKV, num_computed: int) -> None:
        """Release what no row after the first `num_computed` positions can see; capture it if it is to be a donor."""

    def conclude(self, kv: RequestKV, num_computed: int) -> None:
        """Let what the request has after `num_computed` positions be stored with its prefix: it computes no more."""

    def rebuild(self) -> None:
        """Count no request any more: all slots were taken back at once."""

    def release(self, row: WindowRow | StateRow | None) -> None:
        """Give everything back; the lock is the caller's to release. Harmless for a row that has nothing."""
