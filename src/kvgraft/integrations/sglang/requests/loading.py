"""Loads for requests that SGLang has admitted: what touches the exact prefix first, then region by region between chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvgraft.integrations.sglang.requests.guard import guarded, nothing, together

if TYPE_CHECKING:
    from torch import Tensor

    from kvgraft.integrations.sglang.donors.loader import Loader
    from kvgraft.integrations.sglang.requests.books import Books
    from kvgraft.integrations.sglang.requests.request import SGLangRequest


@dataclass(frozen=True, eq=False)
class Loading:
    """Loads spans when SGLang has slots for them. Not thread-safe. A `req` is SGLang's `Req`.

    Attributes:
        min_run: Shortest run that is loaded.
    """

    books: Books
    loader: Loader
    min_run: int

    @together("graft", lambda: 0)
    def load_first(self, req: Any, promised: int) -> int:  # noqa: ANN401
        """Load what touches the exact prefix, all that was promised or nothing; returns the number of tokens."""
        self.books.require_sound()
        state = self.books.requests.get(req)
        slots = None if state is None else self._load(state, req, promised)
        if state is None or slots is None:
            return 0
        state.held.private.append(slots)
        return len(slots)

    @together("graft", nothing)
    def load_next(self, req: Any, room: int) -> Tensor | None:  # noqa: ANN401
        """Load the regions that begin where the computed part of `req`, between two chunks, ends.

        At most `room` slots are taken, so that running requests are not in danger. Returns those of the positions from
        `req.prefix_len` on, for the caller to write into the row; None for nothing.
        """
        self.books.require_sound()
        state = self.books.requests.get(req)
        if state is None:
            return None
        state.goes_on(req.prefix_len, self.min_run)
        total = sum(span.length for span in state.adjoining(req.prefix_len))
        return self._load(state, req, total if total <= room else -1) if total else None

    def _load(self, state: SGLangRequest, req: Any, expected: int) -> Tensor | None:  # noqa: ANN401
        slots = self.loader.load(state, req.prefix_len, expected)
        if slots is not None:
            req.skip_radix_cache_insert = True  # nothing approximate is ever published, and copies belong to the row
        return slots

    @guarded("graft", nothing, is_read=True)
    def load_first_only(self, req: Any) -> None:  # noqa: ANN401
        """Give up the regions that do not touch the exact prefix."""
        state = self.books.requests.get(req)
        if state is not None:
            state.load_only(state.adjoining(req.prefix_len))

    @guarded("graft", nothing, is_read=True)
    def next_gap(self, req: Any, position: int) -> int | None:  # noqa: ANN401
        """Return how many tokens to compute from `position` until the next region; None up to the end."""
        state = self.books.requests.get(req)
        start = None if state is None else state.next_start(position)
        return None if start is None else start - position

    def private_slots(self, req: Any) -> list[Tensor]:  # noqa: ANN401
        """Return the slots that were loaded before the request had a row, in order."""
        state = self.books.requests.get(req)
        return [] if state is None else state.held.private
