"""Reuse in one scheduler: promise what can be loaded, load it, publish what was computed, report.

`GraftRadixCache` calls the parts of this at the points where SGLang lets a cache take part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvgraft.integrations.sglang.requests.guard import nothing, together

if TYPE_CHECKING:
    from kvgraft.integrations.sglang.requests.books import Books
    from kvgraft.integrations.sglang.requests.ends import Ends
    from kvgraft.integrations.sglang.requests.loading import Loading
    from kvgraft.integrations.sglang.requests.promises import Promises
    from kvgraft.integrations.sglang.requests.publishing import Publishing
    from kvgraft.integrations.sglang.requests.repairs import Repairs


@dataclass(kw_only=True, eq=False)
class RequestReuse:
    """Takes every request of a scheduler through reuse. Not thread-safe.

    Nothing that happens here fails a request or the scheduler: an exception is logged, counted and becomes a miss. What it
    may have left half changed is verified before it is read again; where that does not hold, all donors are forgotten.

    Attributes:
        books: What is known of requests and donors.
        promises: Before admission.
        loading: From then on, region by region.
        repairs: When the choice of a policy is computed.
        publishing: What requests leave to others.
        ends: When a request gives its row back.
    """

    books: Books
    promises: Promises
    loading: Loading
    repairs: Repairs
    publishing: Publishing
    ends: Ends

    @together("use of stores", nothing)
    def open_stores(self) -> None:
        """Begin to use the stores now, where the first request would do it otherwise: reading all weights takes a while."""
        if self.books.stores is not None and not self.books.is_stale:
            self.books.stores.look_after("-", 0)

    @together("use of stores", nothing)
    def idle(self) -> None:
        """Use the time of a scheduler that has nothing to compute."""
        self.publishing.settle()
        if self.books.stores is not None:
            self.books.stores.idle()
