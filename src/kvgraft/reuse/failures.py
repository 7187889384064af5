"""The miss that an exception becomes, and what it leaves of the books that it came out of."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvgraft.errors import CorruptCacheError, KVGraftError, PolicyError
from kvgraft.types import Miss, MissReason

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)


def miss_of(error: BaseException) -> Miss:
    """Return the miss that a failure of reuse becomes; one that a selection policy caused has a reason of its own."""
    caused: BaseException | None = error
    while caused is not None:
        if isinstance(caused, PolicyError):
            return Miss(MissReason.POLICY_ERROR, str(caused))
        caused = caused.__cause__
    return Miss(MissReason.ERROR, f"{type(error).__name__}: {error}")


class Soundness:
    """Whether books, which say where K/V lie and whose they are, can be read. Not thread-safe.

    A failure may come from the middle of a change. So books are doubtful after it, and verified before they are read again;
    where they do not hold, everything begins anew with nothing in them.
    """

    _is_doubtful = _is_lost = False

    @property
    def is_doubtful(self) -> bool:
        """Whether a change may have been left half done since `trust`; to be verified before anything is read again."""
        return self._is_doubtful

    def doubt(self, error: BaseException) -> None:
        """Note an error that may have interrupted a change.

        Our own errors are raised before anything changes. Any other may come from the middle: memory may be out at every
        allocation, however small.
        """
        if isinstance(error, CorruptCacheError) or not isinstance(error, KVGraftError):
            self.distrust()

    def distrust(self) -> None:
        """Have everything verified before it is read again."""
        self._is_doubtful = True

    def condemn(self) -> None:
        """Have everything begin anew before it is read again, whether it can be verified or not."""
        self._is_doubtful = self._is_lost = True

    def trust(self) -> None:
        """Note that everything was verified, or is empty."""
        self._is_doubtful = self._is_lost = False

    def settle(self, check: Callable[[], None], begin_anew: Callable[[], None]) -> None:
        """Verify what is doubtful with `check`, which raises where it does not hold: then `begin_anew` empties everything.

        Raises:
            Exception: It cannot begin anew yet. It is as doubtful as before, and nothing may be read.
        """
        if not self.is_doubtful:
            return
        if not self._is_lost:
            try:
                check()
            except Exception:
                self._is_lost = True
                logger.exception("what is known of donors is not sound; it begins anew with none")
        if self._is_lost:
            begin_anew()
        self.trust()
