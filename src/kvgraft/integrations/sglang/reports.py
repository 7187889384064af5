"""What becomes of every request: one report, and one per attempt, for log, file, response and metrics."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

from kvgraft.integrations.sglang.texts import HostKV, TreeKV
from kvgraft.reuse.report import report_as_dict
from kvgraft.types import DonorId, Fidelity, GraftReport, Miss, MissReason, SpanReport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgraft.integrations.sglang.flight import Flight, LoadedSpan

logger = logging.getLogger(__name__)


class Metrics(Protocol):
    """Takes counts; `SGLangMetrics` gives them to SGLang's Prometheus endpoint."""

    def count_report(self, report: GraftReport) -> None:
        """One request that ended."""

    def count_error(self, stage: str) -> None:
        """A lookup, copy or registration failed and became a miss."""


class NoMetrics:
    """Counts nothing."""

    def count_report(self, report: GraftReport) -> None:
        """Ignore it."""

    def count_error(self, stage: str) -> None:
        """Ignore it."""


class RequestLog:
    """Writes what became of requests. Not thread-safe.

    Args:
        metrics: Counters.
        path: File that gets one JSON line per request; empty for none.
        is_first_rank: The other ranks keep quiet, for they would say the same.
    """

    def __init__(self, metrics: Metrics, path: str = "", *, is_first_rank: bool = True) -> None:
        self._path = Path(path) if path and is_first_rank else None
        self._is_first_rank = is_first_rank
        self._pending: WeakKeyDictionary[Any, dict[str, object]] = WeakKeyDictionary()
        self.metrics = metrics
        self.num_errors = 0

    @property
    def has_pending(self) -> bool:
        """Whether a response waits for its report."""
        return bool(self._pending)

    def finished(self, req: Any, flight: Flight, policy: str) -> None:  # noqa: ANN401 - SGLang's Req
        """A request has its answer."""
        entry = self._ended(flight, policy, "finished", len(req.output_ids))
        if self._is_first_rank:
            self._pending[req] = entry

    def aborted(self, flight: Flight, policy: str) -> None:
        """A request ended without an answer."""
        self._ended(flight, policy, "aborted", 0)

    def failed(self, stage: str, rid: str, error: Exception) -> Miss:
        """Log and count an exception that was caught; returns the miss that it becomes."""
        logger.error("%s for request %s failed; it goes on without", stage, rid, exc_info=error)
        self.count_error(stage)
        return Miss(MissReason.ERROR, f"{type(error).__name__}: {error}")

    def count_error(self, stage: str) -> None:
        """Count something that went wrong and became a miss."""
        self.num_errors += 1
        self.metrics.count_error(stage)

    def take(self, req: Any) -> dict[str, object] | None:  # noqa: ANN401 - SGLang's Req
        """Return a request's report once, for its response."""
        return self._pending.pop(req, None)

    def _ended(self, flight: Flight, policy: str, outcome: str, output_tokens: int) -> dict[str, object]:
        attempts = [*flight.attempts, Attempt.of(flight, policy)]
        report = least_exact([attempt.report for attempt in attempts])
        entry: dict[str, object] = {
            "request_id": flight.rid,
            "time": time.time(),
            "outcome": outcome,
            "output_tokens": output_tokens,
            "report": report_as_dict(report),
            "attempts": [attempt.as_dict() for attempt in attempts],
        }
        if self._is_first_rank:
            self.metrics.count_report(report)
            self._tell(flight, outcome)
            self._write(entry)
        return entry

    def _tell(self, flight: Flight, outcome: str) -> None:
        level = logging.INFO if flight.loaded else logging.DEBUG
        logger.log(
            level,
            "request %s %s: %d prompt tokens, %d exact, %d copied in %d regions, %d steps, lookup %.2f ms, copy %.2f ms%s",
            flight.rid,
            outcome,
            flight.num_tokens,
            flight.exact_len,
            flight.loaded_len,
            len(flight.loaded),
            flight.num_steps,
            flight.lookup_ms,
            flight.graft_ms,
            "" if flight.miss is None else f"; {flight.miss.reason.value}: {flight.miss.detail}",
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


@dataclass(frozen=True, slots=True)
class Attempt:
    """What became of a request up to its end or to a retraction."""

    report: GraftReport
    sources: tuple[dict[str, object], ...]
    prefill_steps: int

    @classmethod
    def of(cls, flight: Flight, policy: str) -> Attempt:
        """Sum up where a request stands."""
        return cls(graft_report(flight, policy), tuple(map(_source, flight.loaded)), flight.num_steps)

    def as_dict(self) -> dict[str, object]:
        """Return it in types that JSON has."""
        return {**report_as_dict(self.report), "sources": list(self.sources), "prefill_steps": self.prefill_steps}


def least_exact(reports: Sequence[GraftReport]) -> GraftReport:
    """Return the report of a request that was retracted: its answer rests on every attempt, so the worst one speaks."""
    return max(reports, key=lambda report: (report.shifted_tokens + report.substituted_tokens, -report.exact_tokens))


def graft_report(flight: Flight, policy: str) -> GraftReport:
    """Sum a request's prefill up."""
    by_class = dict.fromkeys(Fidelity, 0)
    for item in flight.loaded:
        by_class[item.span.fidelity] += item.span.length
    miss = flight.miss
    if not flight.loaded and miss is None:
        miss = Miss(MissReason.NO_MATCH, "nothing was loaded")
    return GraftReport(
        num_tokens=flight.num_tokens,
        exact_tokens=flight.exact_len,
        shifted_tokens=by_class[Fidelity.SHIFTED],
        substituted_tokens=by_class[Fidelity.SUBSTITUTED],
        recomputed_tokens=sum(item.span.recomputed for item in flight.loaded),
        computed_tokens=max(0, flight.num_tokens - flight.exact_len - flight.loaded_len),
        spans=tuple(_span_report(item) for item in flight.loaded),
        policy=policy,
        timings_ms={"lookup": flight.lookup_ms, "graft": flight.graft_ms},
        miss=None if flight.loaded else miss,
    )


def _span_report(item: LoadedSpan) -> SpanReport:
    span, donor = item.span, item.span.donor
    assert donor is not None
    position = donor.start_position + span.donor_start
    return SpanReport(
        span.start,
        span.length,
        DonorId(int(donor.donor_id)),
        span.donor_start,
        span.start - position,
        span.fidelity,
        donor.generation,
    )


def _source(item: LoadedSpan) -> dict[str, object]:
    """Say what computed a span, where in its text, and from which tier it was copied."""
    donor = item.span.donor
    assert donor is not None
    kv = donor.kv
    assert isinstance(kv, TreeKV | HostKV)
    origin = kv.text.origin if isinstance(kv, TreeKV) else kv.origin
    position = donor.start_position + item.span.donor_start
    return {"request": origin.request, "attempt": origin.attempt, "position": position, "tier": item.tier}
