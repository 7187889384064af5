"""Work that ranks of one server do in step: if it fails on one of them, it has failed on all.

Ranks meet before every collective operation and at the end of every piece of work, and say where they are and whether they
are well. Work may lie in other work: all leave what has failed, wherever they are in it, and go on behind it (docs/adr/0019).
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, TypeVar

from kvgraft.errors import IntegrationError, KVGraftError, one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Result = TypeVar("Result")

MOST_NUMBERS = 3
"""Numbers that ranks may compare where they meet: ranks elsewhere take part in a reduction of the same shape."""
_WELL = 1 << 30  # in place of the depth of what has failed


class FailedTogetherError(IntegrationError):
    """Work failed, here or on another rank, and every rank knows it."""

    @property
    def origin(self) -> BaseException:
        """What failed on this rank; this error itself where it was another one."""
        error: BaseException = self
        while isinstance(error, FailedTogetherError) and error.__cause__ is not None:
            error = error.__cause__
        return error


class _LeftError(BaseException):
    """Another rank has left work of the depth in `args`; no handler within that work is to go on."""


class Together:
    """Calls work on a rank; every other one calls the same. `lowest` reduces numbers over ranks. Not thread-safe."""

    def __init__(self, lowest: Callable[[Sequence[int]], Sequence[int]]) -> None:
        self._lowest = lowest
        self._depth = 0

    def __call__(self, work: Callable[[], Result]) -> Result:
        """Return what `work` returns here, once it has been done on all ranks.

        Raises:
            FailedTogetherError: It failed here or on another rank; the error here is its cause.
        """
        depth = self._depth = self._depth + 1
        failure: Exception | None = None
        try:
            try:
                result = work()
            except Exception as error:  # noqa: BLE001 - the others wait for this rank
                failure = error
            self._meet("end", (), is_well=failure is None)
        except _LeftError as left:
            if left.args[0] < depth:
                raise
            if failure is None:
                raise FailedTogetherError("another rank failed; its log says why") from None
            reason = str(failure) if isinstance(failure, KVGraftError) else one_line(failure)
            raise FailedTogetherError(reason) from failure
        finally:
            self._depth = depth - 1
        return result

    def meet(self, place: str, *numbers: int) -> list[int]:
        """Wait for all ranks directly before the collective operation `place`; return the lowest of each of `numbers`.

        Raises `FailedTogetherError` outside of work if they are in different places.
        """
        return self._meet(place, numbers, is_well=True)[: len(numbers)]

    def _meet(self, place: str, numbers: Sequence[int], *, is_well: bool) -> list[int]:
        # The depth comes first, so that of two places the lower is the one further out.
        here = (self._depth << 32) + zlib.crc32(place.encode())
        told = [_WELL if is_well else self._depth, here, -here, *numbers, *[0] * (MOST_NUMBERS - len(numbers))]
        failed, low, negated, *found = self._lowest(told)
        if low != -negated:
            failed = min(failed, low >> 32)
        if failed == _WELL:
            return found
        if not self._depth:
            raise FailedTogetherError(f"another rank is not at {place!r}; its log says why")
        raise _LeftError(max(failed, 1))
