"""Reports of requests, with one per attempt, for log, file, response and metrics."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

from kvgraft.reuse.failures import Soundness, miss_of
from kvgraft.reuse.metrics import (
    GRAFT_ERRORS,
    Sample,
    donor_samples,
    num_failed,
    samples,
    semantic_samples,
)
from kvgraft.reuse.report import report_as_dict, worst_report
from kvgraft.reuse.together import FailedTogetherError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvgraft.integrations.sglang.donors.keeper import DonorKeeper
    from kvgraft.integrations.sglang.requests.request import SGLangRequest
    from kvgraft.integrations.sglang.stored.link import StoreLink
    from kvgraft.reuse.store_samples import StoreSamples
    from kvgraft.types import GraftReport, Miss

logger = logging.getLogger(__name__)


def was_aborted(req: Any) -> bool:  # noqa: ANN401 - SGLang's Req
    """Whether a request that finished was ended by its client, or by an error of its own."""
    return type(req.finished_reason).__name__ == "FINISH_ABORT"


class SampleSink(Protocol):
    """Takes samples; `SGLangMetrics` shows them on SGLang's Prometheus endpoint."""

    def record(self, samples: Iterable[Sample]) -> None:
        """Record samples."""


class RequestLog:
    """Writes reports of requests, and counts. Not thread-safe.

    Args:
        metrics: Takes counts; None for none.
        path: File that gets one JSON line per request; empty for none.
        is_first_rank: Of the ranks, which all see the same, only the first writes.

    Attributes:
        books: What is known of requests, donors and slots; doubtful after a failure that may have left it half changed.
    """

    def __init__(self, metrics: SampleSink | None, path: str = "", *, is_first_rank: bool = True) -> None:
        self._path = Path(path) if path and is_first_rank else None
        self._is_first_rank = is_first_rank
        self._pending: WeakKeyDictionary[Any, dict[str, object]] = WeakKeyDictionary()
        self.books = Soundness()
        self.metrics = metrics
        self._stores: StoreSamples | None = None
        self.num_errors = 0

    @property
    def has_pending(self) -> bool:
        """Whether a response waits for its report."""
        return bool(self._pending)

    def finished(self, req: Any, state: SGLangRequest, policy: str) -> None:  # noqa: ANN401 - SGLang's Req
        """Report a request that has its answer, or what there was of it when it was aborted."""
        entry = self._ended(state, policy, "aborted" if was_aborted(req) else "finished", len(req.output_ids))
        if self._is_first_rank:
            self._pending[req] = entry

    def aborted(self, state: SGLangRequest, policy: str) -> None:
        """Report a request that was aborted before it had any of its answer."""
        self._ended(state, policy, "aborted", 0)

    def failed(self, stage: str, rid: str, error: Exception) -> Miss:
        """Log and count an exception that was caught, and have verified what it may have left half changed.

        Returns the miss that it becomes.
        """
        if isinstance(error, FailedTogetherError) and isinstance(error.origin, Exception):
            error = error.origin
        self.books.doubt(error)
        logger.error("%s for request %s failed; it goes on without", stage, rid, exc_info=error)
        self.count_error()
        return miss_of(error)

    def count_semantic(self, outcomes: Mapping[str, int]) -> None:
        """Count calls of a semantic provider by outcome; failed ones are failures of reuse."""
        self._record(semantic_samples(outcomes))
        for _ in range(num_failed(outcomes)):
            self.count_error()

    def count_error(self) -> None:
        """Count a failure that became a miss."""
        self.num_errors += 1
        self._record([Sample(GRAFT_ERRORS, (), 1)])

    def show_donors(self, keeper: DonorKeeper) -> None:
        """Show how many donors there are."""
        self._record(donor_samples(len(keeper), keeper.catalogue.num_tokens, keeper.host_bytes))

    def show_stores(self, stores: StoreLink) -> None:
        """Show what stores have done so far."""
        if self._stores is None:
            from kvgraft.reuse.store_samples import StoreSamples  # loaded with the stores

            self._stores = StoreSamples()
        self._record(self._stores.changes(stores.counts(), stores.num_stored))

    def _record(self, counted: Iterable[Sample]) -> None:
        if self.metrics is None:
            return
        try:
            self.metrics.record(counted)
        except Exception:
            logger.exception("metrics cannot be recorded and no more will be")
            self.metrics = None

    def take(self, req: Any) -> dict[str, object] | None:  # noqa: ANN401 - SGLang's Req
        """Return a request's report once, for its response."""
        return self._pending.pop(req, None)

    def _ended(self, state: SGLangRequest, policy: str, outcome: str, output_tokens: int) -> dict[str, object]:
        # One that waits again after a retraction has not been matched.
        current = () if state.attempts and not state.prompt.num_tokens else (state.attempt(policy),)
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
            self._record(samples(report))
            self._log_entry(state, outcome, report)
            self._write(entry)
        return entry

    def _log_entry(self, state: SGLangRequest, outcome: str, report: GraftReport) -> None:
        logger.log(
            logging.INFO if report.spans else logging.DEBUG,
            "request %s %s: %d prompt tokens, %d exact, %d gone on from, %d moved, %d regions, %d steps, lookup %.2f ms, "
            "copy %.2f ms%s",
            state.rid,
            outcome,
            report.num_tokens,
            report.exact_tokens,
            report.continued_tokens,
            report.shifted_tokens + report.substituted_tokens,
            len(report.spans),
            state.num_steps,
            state.decision.lookup_ms,
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
