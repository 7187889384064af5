"""What window layers ask of the K/V side of a request: an interface, and the model that has no such layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvgraft.engine.request_kv import RequestKV


class RequestWindows(ABC):
    """Moves the windows of requests over their sequences, where window layers have slots of their own. Not thread-safe.

    Attributes:
        num_errors: Captures for donors that failed; the text in question does not become a donor.
        longest_piece: Rows of one sequence for which there is always room if it runs alone; None for any number.
    """

    num_errors: int = 0
    longest_piece: int | None = None

    @abstractmethod
    def adopt(self, kv: RequestKV, swa_indices: NDArray[np.int64], *, is_donor: bool) -> None:
        """Begin with the window of the exact prefix, locked by `kv.lock`.

        Args:
            kv: With the slots of its exact prefix only.
            swa_indices: Window slots of the prefix, -1 where they are gone.
            is_donor: Whether the request's text is to become a donor.
        """

    @abstractmethod
    def widen(self, kv: RequestKV) -> None:
        """Follow `kv.kv_indices` when it has grown."""

    @abstractmethod
    def require_room(self, kv: RequestKV, num_tokens: int) -> None:
        """Raise `CapacityError` unless the request can begin to compute `num_tokens` positions."""

    @abstractmethod
    def fill(self, kv: RequestKV, num_tokens: int) -> None:
        """Take slots for all positions up to `num_tokens`, for a graft.

        Raises:
            CapacityError: There are not enough.
        """

    @abstractmethod
    def reserve(self, kv: RequestKV, positions: NDArray[np.int64]) -> int:
        """Take slots for the rows at `positions`, ascending; returns for how many of them there are slots now, maybe none."""

    @abstractmethod
    def grow(self, kv: RequestKV, num_tokens: int) -> None:
        """See to it that `num_tokens` positions have had slots; all behind the present ones are computed.

        Raises:
            CapacityError: There are not enough.
        """

    @abstractmethod
    def advance(self, kv: RequestKV, num_computed: int) -> None:
        """Give back what no row behind the first `num_computed` positions can see; captures it if it is to be a donor."""

    @abstractmethod
    def release(self, kv: RequestKV) -> None:
        """Give everything back; the lock is the caller's to release. Harmless for a request that has none."""


class NoWindows(RequestWindows):
    """All layers share one space of slots: there is nothing to move, and room for any number of rows."""

    def adopt(self, kv: RequestKV, swa_indices: NDArray[np.int64], *, is_donor: bool) -> None:
        """Leave the request without window slots."""

    def widen(self, kv: RequestKV) -> None:
        """There is no second row of slots."""

    def require_room(self, kv: RequestKV, num_tokens: int) -> None:
        """Never raises: what the request needs it has in the one space."""

    def fill(self, kv: RequestKV, num_tokens: int) -> None:
        """The slots of all layers are there already."""

    def reserve(self, kv: RequestKV, positions: NDArray[np.int64]) -> int:
        """All rows can be computed."""
        return len(positions)

    def grow(self, kv: RequestKV, num_tokens: int) -> None:
        """The slots of all layers are there already."""

    def advance(self, kv: RequestKV, num_computed: int) -> None:
        """Every row sees every position: nothing is given back before the end."""

    def release(self, kv: RequestKV) -> None:
        """There is nothing to give back."""
