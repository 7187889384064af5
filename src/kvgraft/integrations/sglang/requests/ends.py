"""The end of a request: it finished, was aborted or begins again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvgraft.integrations.sglang.requests.guard import guarded, nothing

if TYPE_CHECKING:
    from kvgraft.integrations.sglang.requests.books import Books
    from kvgraft.integrations.sglang.requests.repairs import Repairs
    from kvgraft.integrations.sglang.requests.request import SGLangRequest


@dataclass(frozen=True, eq=False)
class Ends:
    """Takes leave of requests, and has them reported. Not thread-safe. A `req` is SGLang's `Req`.

    Attributes:
        policy: Name of the selection policy, for reports.
    """

    books: Books
    repairs: Repairs
    policy: str

    def released(self, req: Any) -> None:  # noqa: ANN401
        """Take leave of a request that gave its row back: finished, aborted or retracted.

        Where that fails it has no report, also not of what follows a retraction.
        """
        state = self.books.requests.pop(req, None)
        try:
            self.repairs.drop(req)
            if state is not None:
                self._released(req, state)
        except Exception as error:  # noqa: BLE001 - logged and counted
            self.books.log.failed("report", "-" if state is None else state.rid, error)
            self.repairs.drop(req)
            if state is not None and not req.finished():
                self.books.requests[req] = state.unreported()

    def _released(self, req: Any, state: SGLangRequest) -> None:  # noqa: ANN401
        if req.finished():
            if state.is_reported:
                self.books.log.finished(req, state, self.policy)
            self.books.log.show_donors(self.books.keeper)
            if self.books.stores is not None:
                self.books.log.show_stores(self.books.stores.link)
        else:
            if state.lineage.spans:
                req.skip_radix_cache_insert = False  # as it was; what is computed from now on may be exact
            self.books.requests[req] = state.retracted(self.policy)

    @guarded("report", nothing, is_read=True)
    def aborted(self, handle: object) -> None:
        """Forget the request of a handle, which ended before it had a row, or releases it next.

        A handle is known by identity: those of two requests of one id are equal.
        """
        for req, state in list(self.books.requests.items()):
            if req.cache_request_handle is handle:
                del self.books.requests[req]
                self.repairs.drop(req)
                if state.reads is not None:
                    state.reads.cancel()
                self.books.log.aborted(state, self.policy)
