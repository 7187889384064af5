"""Window slots of requests: the interface, and its behaviour for models with one space of slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvgraft.engine.kv.kept_prefixes import PrefixLock
    from kvgraft.engine.kv.request_kv import RequestKV
    from kvgraft.engine.kv.window_row import WindowRow


class RequestWindows:
    """Moves the windows of requests over their sequences; here, where no layer has window slots, there is room for any row.

    `SlidingWindows` is for models with window layers. Not thread-safe.

    Attributes:
        num_errors: Captures for donors that failed; the text in question does not become a donor.
        longest_piece: Rows of one sequence that always have room if it runs alone; None for any number.
    """

    num_errors: int = 0
    longest_piece: int | None = None

    def adopt(self, lock: PrefixLock | None, swa_indices: NDArray[np.int64], *, is_donor: bool) -> WindowRow | None:
        """Return the window slots of a request that begins with its exact prefix; None where there are none.

        Args:
            lock: On the prefix.
            swa_indices: Window slots of the prefix, -1 where they are gone.
            is_donor: The request's text is to become a donor.
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
        """Take slots for the rows at `positions`, ascending; returns how many of them have slots now, maybe none."""
        return len(positions)

    def grow(self, kv: RequestKV, num_tokens: int) -> None:
        """Give `num_tokens` positions slots; all after the present ones are computed.

        Raises:
            CapacityError: There are not enough.
        """

    def advance(self, kv: RequestKV, num_computed: int) -> None:
        """Release what no row after the first `num_computed` positions can see; capture it if it is to be a donor."""

    def release(self, row: WindowRow | None) -> None:
        """Give everything back; the lock is the caller's to release. Harmless for a row that has nothing."""
