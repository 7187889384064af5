"""What becomes of every request: one report, and one per attempt, for log, file, response and metrics."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

from kvgraft.reuse.failures import miss_of
from kvgraft.reuse.report import report_as_dict, worst_report

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvgraft.integrations.sglang.donors.library import DonorLibrary
    from kvgraft.integrations.sglang.request_state import RequestState
    from kvgraft.integrations.sglang.stored.link import StoreLink
    from kvgraft.types import GraftReport, Miss, StoreCounts

logger = logging.getLogger(__name__)


class Metrics(Protocol):
    """Takes counts; `SGLangMetrics` gives them to SGLang's Prometheus endpoint."""

    def count_report(self, report: GraftReport) -> None:
        """One request that ended."""

    def count_error(self) -> None:
        """Something failed and became a miss."""

    def show_donors(self, num_donors: int, num_tokens: int, host_bytes: int) -> None:
        """How many donors there are."""

    def show_stores(self, counts: Iterable[StoreCounts], num_cold: int) -> None:
        """What stores have done so far, and how many donors they have."""


class RequestLog:
    """Writes what became of requests. Not thread-safe.

    Args:
        metrics: Counters; None for none.
        path: File that gets one JSON line per request; empty for none.
        is_first_rank: The other ranks keep quiet, for they would say the same.
    """

    def __init__(self, metrics: Metrics | None, path: str = "", *, is_first_rank: bool = True) -> None:
        self._path = Path(path) if path and is_first_rank else None
        self._is_first_rank = is_first_rank
        self._pending: WeakKeyDictionary[Any, dict[str, object]] = WeakKeyDictionary()
        self.metrics = metrics
        self.num_errors = 0

    @property
    def has_pending(self) -> bool:
        """Whether a response waits for its report."""
        return bool(self._pending)

    def finished(self, req: Any, state: RequestState, policy: str) -> None:  # noqa: ANN401 - SGLang's Req
        """A request has its answer."""
        entry = self._ended(state, policy, "finished", len(req.output_ids))
        if self._is_first_rank:
            self._pending[req] = entry

    def aborted(self, state: RequestState, policy: str) -> None:
        """A request ended without an answer."""
        self._ended(state, policy, "aborted", 0)

    def failed(self, stage: str, rid: str, error: Exception) -> Miss:
        """Log and count an exception that was caught; returns the miss that it becomes."""
        logger.error("%s for request %s failed; it goes on without", stage, rid, exc_info=error)
        self.count_error()
        return miss_of(error)

    def count_error(self) -> None:
        """Count something that went wrong and became a miss."""
        self.num_errors += 1
        if self.metrics is not None:
            self.metrics.count_error()

    def show_donors(self, library: DonorLibrary) -> None:
        """Show how many donors there are."""
        if self.metrics is not None:
            self.metrics.show_donors(len(library), library.catalogue.num_tokens, library.host_bytes)

    def show_stores(self, stores: StoreLink) -> None:
        """Show what stores have done so far."""
        if self.metrics is not None:
            self.metrics.show_stores(stores.counts(), len(stores.cold))

    def take(self, req: Any) -> dict[str, object] | None:  # noqa: ANN401 - SGLang's Req
        """Return a request's report once, for its response."""
        return self._pending.pop(req, None)

    def _ended(self, state: RequestState, policy: str, outcome: str, output_tokens: int) -> dict[str, object]:
        # One that waits again after a retraction has not been matched.
        current = () if state.attempts and not state.num_tokens else (state.attempt(policy),)
        attempts = (*state.attempts, *current)
        report = worst_report(attempt.report for attempt in attempts)
        entry: dict[str, object] = {
            "request_id": state.rid,
            "time": time.time(),
            "outcome": outcome,
            "output_tokens": output_tokens,
            "report": report_as_dict(report),
            "attempts": [attempt.as_dict() for attempt in attempts],
        }
        if self._is_first_rank:
            if self.metrics is not None:
                self.metrics.count_report(report)
            self._tell(state, outcome, report)
            self._write(entry)
        return entry

    def _tell(self, state: RequestState, outcome: str, report: GraftReport) -> None:
        logger.log(
            logging.INFO if report.spans else logging.DEBUG,
            "request %s %s: %d prompt tokens, %d exact, %d copied in %d regions, %d steps, lookup %.2f ms, copy %.2f ms%s",
            state.rid,
            outcome,
            report.num_tokens,
            report.exact_tokens,
            report.shifted_tokens + report.substituted_tokens,
            len(report.spans),
            state.num_steps,
            state.lookup_ms,
            state.graft_ms,
            "" if state.miss is None else f"; {state.miss.reason.value}: {state.miss.detail}",
        )

    def _write(self, entry: dict[str, object]) -> None:
        if self._path is None:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as error:
            logger.error("reports cannot be written to %s and no more will be: %s", self._path, error)  # noqa: TRY400
            self._path = None
