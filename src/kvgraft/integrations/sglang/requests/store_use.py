"""Stores on the way of a request: when they are opened, how long it waits for them, and what goes on without them."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvgraft.reuse.together import FailedTogetherError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvgraft.integrations.sglang.reporting.reports import RequestLog
    from kvgraft.integrations.sglang.requests.request import SGLangRequest
    from kvgraft.integrations.sglang.stored.link import StoreLink
    from kvgraft.types import Miss

logger = logging.getLogger(__name__)

_WITHOUT_STORES = "stores are not used any more, until SGLang's cache is emptied with /flush_cache"

_SHOWN_EVERY_S = 1.0
"""How often an idle scheduler shows counts of stores; the last writes come after the last request."""


@dataclass(eq=False)
class StoreUse:
    """Asks the stores of a scheduler, and does without them once that fails. Not thread-safe.

    While `is_between` is set, weights may change without notice: nothing goes to a store or comes from one.
    """

    link: StoreLink
    log: RequestLog
    clock: Callable[[], float]
    is_between: bool = field(default=False, init=False)
    _has_failed: bool = field(default=False, init=False)
    _shown_at: float = field(default=float("-inf"), init=False)

    def look_after(self, rid: str, num_tokens: int) -> None:
        """Open the stores if they are not, and move things in and out, as much as a request of `num_tokens` pays for."""
        if self.is_between or self._has_failed:
            return
        try:
            if not self.link.is_open:
                self.link.open()
            self.link.tick(num_tokens)
        except FailedTogetherError as error:
            self._failed(rid, error)

    def idle(self) -> None:
        """Use the time of a scheduler that has nothing to compute."""
        try:
            self.link.tick(is_idle=True)
        except FailedTogetherError as error:
            self._failed("-", error)
        if self.clock() - self._shown_at >= _SHOWN_EVERY_S:
            self._shown_at = self.clock()
            self.log.show_stores(self.link)

    def may_read(self, state: SGLangRequest) -> bool:
        """Whether donors in stores count for a request: it waits once.

        Adapters are known by names, which may come to mean other weights: K/V of theirs are in no store.
        """
        return state.read is None and not state.namespace.adapter

    def begin(self, state: SGLangRequest) -> bool:
        """Begin to read the spans that only a store has; the rest is planned again when they are there."""
        stored = [span for span in state.due if span.is_stored]
        if not stored:
            return False
        state.load_only()
        try:
            state.reading(self.link.begin(stored))
        except FailedTogetherError as error:
            miss = self._failed(state.rid, error)
            state.missed(miss)
            state.read_over(miss)
            return False
        return True

    def is_reading(self, state: SGLangRequest) -> bool:
        """Whether stored K/V are still on their way; those that have arrived are at hand from now on."""
        reads = state.reads
        if reads is None:
            return False
        try:
            is_over = self.link.settle(reads)
        except FailedTogetherError as error:
            is_over, reads.miss = True, self._failed(state.rid, error)
            reads.cancel()
        if is_over:
            state.read_over(reads.miss, reads.elapsed_ms)
        return not is_over

    def nap(self, state: SGLangRequest) -> None:
        """Wait a moment for the reads of a request."""
        if state.reads is not None:
            self.link.nap(state.reads)

    def time_prefill(self, state: SGLangRequest) -> None:
        """Measure the prefill of a prompt that was computed after an exact prefix alone."""
        if state.is_timed:
            return
        state.timed()
        first, prompt = state.lineage.prefix_len, state.prompt
        cost = self.link.costs.compute_cost(first, prompt.num_tokens)
        self.link.prefill.observe(prompt.num_tokens - first, cost, self.clock() - prompt.at)

    def close(self, *, weights_change: bool) -> None:
        """Forget everything that is stored; a failure of before counts no more."""
        self._has_failed = False
        self.link.close(weights_change=weights_change)

    def _failed(self, rid: str, error: Exception) -> Miss:
        """Do without stores from now on, on all ranks: our use of them failed, not a store, which copes with that itself."""
        self._has_failed = True
        self.link.close(weights_change=False)
        logger.warning(_WITHOUT_STORES)
        return self.log.failed("use of stores", rid, error)
