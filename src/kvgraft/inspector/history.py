"""Records of requests, kept for the page."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from kvgraft.explain import ExplainedRequest, RunKind
from kvgraft.inspector.entries import Entry, EntryLog
from kvgraft.reuse.report import report_as_dict

if TYPE_CHECKING:
    from kvgraft.observability.recorder import IdleRecord, RequestRecord, StepRecord


class RequestHistory:
    """A `Recorder` that keeps the last requests as they were recorded; what a page shows of them is made when it asks.

    Attributes:
        log: The requests.
    """

    def __init__(self) -> None:
        self.log = EntryLog()

    def record_request(self, record: RequestRecord) -> None:
        """Keep a request that has ended."""
        self.log.add(partial(_entry, record, time.time()))

    def record_step(self, record: StepRecord) -> None:
        """Pass over a step: the page reads the state when it shows it."""

    def record_idle(self, record: IdleRecord) -> None:
        """Pass over a pass that no request waited for."""


def _entry(record: RequestRecord, ended: float, number: int) -> Entry:
    report = record.report
    counts = {} if report is None else {kind: getattr(report, f"{kind}_tokens") for kind in RunKind}
    return Entry(
        number,
        ended,
        record.request_id,
        record.outcome,
        record.prompt_tokens,
        record.output_tokens,
        record.ttft_s,
        record.total_s,
        counts,
        "" if report is None or report.miss is None else report.miss.reason.value,
        None if report is None else partial(_explained, record),
    )


def _explained(record: RequestRecord) -> ExplainedRequest:
    assert record.report is not None
    return ExplainedRequest.of_report(
        report_as_dict(record.report), record.request_id, record.outcome, record.output_tokens
    )
