"""What the parts of one scheduler's reuse know together, and when it is forgotten.

That is after a flush, when weights change, where ranks have come to differ and where it does not hold.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from kvgraft.reuse.together import FailedTogetherError

if TYPE_CHECKING:
    from kvgraft.integrations.sglang.donors.continuations import Continuations
    from kvgraft.integrations.sglang.donors.keeper import DonorKeeper
    from kvgraft.integrations.sglang.donors.request_texts import RequestTexts
    from kvgraft.integrations.sglang.planning.ranks import Ranks
    from kvgraft.integrations.sglang.reporting.reports import RequestLog
    from kvgraft.integrations.sglang.requests.request import SGLangRequest
    from kvgraft.integrations.sglang.requests.store_use import StoreUse
    from kvgraft.types import Miss

logger = logging.getLogger(__name__)

STALE = "SGLang's cache may hold K/V of other weights; nothing is copied until it is emptied with /flush_cache"
"""Why nothing is reused meanwhile."""
UNLIKE = "tensor-parallel ranks had different donors"
"""Why nothing was reused once, after which they have none."""


@dataclass(kw_only=True, eq=False)
class Books:
    """Requests, donors and what failed, of one scheduler. Not thread-safe.

    Attributes:
        continuations: What requests go on from that accept copies.
        stores: Stores that outlive this process; None for none.
        requests: Those that have been matched and have not ended, as objects: ids come from clients, and one that went away
            may ask again under an id that is still on its way.
        is_stale: SGLang's cache may hold K/V of other weights, so that nothing is copied or registered.
        is_empty: Nothing was matched since the last flush.
    """

    keeper: DonorKeeper
    continuations: Continuations
    request_texts: RequestTexts
    ranks: Ranks
    log: RequestLog
    stores: StoreUse | None = None
    requests: WeakKeyDictionary[Any, SGLangRequest] = field(default_factory=WeakKeyDictionary, init=False)
    is_stale: bool = field(default=False, init=False)
    is_empty: bool = field(default=True, init=False)

    @property
    def num_requests(self) -> int:
        """Requests that have been matched and have not ended."""
        return len(self.requests)

    def failed(self, stage: str, rid: str, error: Exception) -> Miss:
        """Log and count what has failed on all ranks; see `RequestLog.failed`.

        Raises:
            Exception: `error`, if others cannot know: ranks have not failed together, but failed to be together.
        """
        if self.ranks.size > 1 and not isinstance(error, FailedTogetherError):
            raise error
        return self.log.failed(stage, rid, error)

    def clear(self) -> None:
        """Begin anew after a flush, which SGLang does only while no request has K/V: later K/V are of the weights of now."""
        self._forget(weights_change=False)
        self.is_empty, self.is_stale = True, False

    def weights_change(self, *, is_between: bool | None = None) -> None:
        """Note that everything computed so far, by requests that still run too, was computed by other weights.

        SGLang's tree may keep such K/V, and requests may attend to them: nothing is copied or registered until it is flushed.

        Args:
            is_between: Whether from now on weights may change without notice, so that K/V are of unknown weights: nothing
                goes to a store or comes from one. None for no change of that.
        """
        if self.stores is not None and is_between is not None:
            self.stores.is_between = is_between
        self._forget(weights_change=True)
        if not self.is_empty and not self.is_stale:
            self.is_stale = True
            logger.warning("weights change: %s", STALE)

    def _forget(self, *, weights_change: bool) -> None:
        """Forget all donors and all that requests go on from, and what was promised of them; once more if that fails.

        Nothing of before may be found afterwards.
        """
        try:
            self._forget_once(weights_change=weights_change)
        except Exception as error:  # noqa: BLE001 - logged and counted
            self.log.failed("forgetting donors", "-", error)
            self._forget_once(weights_change=weights_change)

    def _forget_once(self, *, weights_change: bool) -> None:
        self._forget_donors()
        if self.stores is not None:
            self.stores.close(weights_change=weights_change)

    # Books that do not hold

    def check(self) -> None:
        """Verify what is known of donors, and of the texts that lie in slots.

        Raises:
            CorruptCacheError: Something does not hold.
        """
        self.keeper.check()
        self.continuations.check()

    def require_sound(self) -> None:
        """Verify the books if an error may have interrupted a change of them, and begin anew where they do not hold.

        Ranks that have others then are found to be unlike before anything is copied.

        Raises:
            Exception: They cannot begin anew yet; the next call tries again.
        """
        if self.log.books.is_doubtful:
            self.log.books.settle(self.check, self._begin_anew_here)

    def _begin_anew_here(self) -> None:
        """Forget all donors on this rank. Others have them: what was promised of them stays so, and is missed together."""
        if self.ranks.size > 1:
            self._clear()
            return
        self._forget_donors()
        if self.stores is not None:
            self.stores.link.close(weights_change=False)  # and opened again, unless stores are not used any more

    # Ranks that are unlike

    def level(self) -> None:
        """Have all ranks forget their donors and empty their trees, where these may differ by now."""
        if self.ranks.size == 1:
            return
        try:
            self.ranks.together(self.begin_anew)
            self.request_texts.empty_tree()
        except Exception as error:  # noqa: BLE001 - logged and counted; what differs is noticed with the next plan
            self.log.failed("forgetting donors", "-", error)

    def begin_anew(self) -> None:
        """Forget all donors on all ranks: they have different ones, as where one of them failed to register a text."""
        self._forget_donors(-self.ranks.lowest([-self.keeper.next_epoch])[0])
        if self.stores is not None:
            self.stores.link.close(weights_change=False)  # and opened again, unless stores are not used any more
        logger.error("%s, and forgot them; another line of some rank's log says what failed", UNLIKE)
        self.log.count_error()

    def _forget_donors(self, first_epoch: int = 0) -> None:
        self._clear(first_epoch)
        for state in self.requests.values():
            state.forget_donors()

    def _clear(self, first_epoch: int = 0) -> None:
        self.keeper.clear(first_epoch)
        self.continuations.clear()
        self.log.books.trust()
