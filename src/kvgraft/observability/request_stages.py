"""The stages of a request, one after another, from the times in its record."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from kvgraft.types import CONTINUATION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgraft.observability.recorder import RequestRecord, RequestTimes
    from kvgraft.types import GraftReport, SpanReport


class Stage(NamedTuple):
    """A part of a request's life, in seconds of `time.perf_counter()`.

    Attributes:
        name: `queue`, `preempted`, `lookup`, `graft`, `prefill` or `decode`.
        start: When it began.
        end: When it ended; not before `start`.
    """

    name: str
    start: float
    end: float


def stages_of(record: RequestRecord) -> list[Stage]:
    """Return what a request went through, in order and without overlaps; nothing if no times were noted.

    `queue` ends when the first lookup begins. Where a request lost its slots before its first token, the time until the
    lookup that counts is `preempted`. `lookup` is match, plan and allocation of slots; `graft`, which only requests with a
    graft have, is copies and what they wait for from a store; `prefill` ends with the first token. The last stage is cut by
    the request's end.
    """
    times = record.times
    if times is None:
        return []
    marks = [
        ("queue", times.arrival),
        ("preempted", times.begun),
        ("lookup", times.lookup),
        ("graft" if _has_graft(record) else "", times.graft),
        ("prefill", times.prefill),
        ("decode", times.first_token),
    ]
    if times.lookup == times.begun:
        del marks[1]
    return _between(times, [(name, moment) for name, moment in marks if moment is not None])


def grafted_spans(report: GraftReport) -> Sequence[SpanReport]:
    """Return what was copied from donors, also where a verified answer has left nothing of it.

    What a prompt goes on from is no copy.
    """
    spans = report.spans if report.healing is None else report.healing.spans
    return tuple(span for span in spans if span.donor_id != CONTINUATION)


def _has_graft(record: RequestRecord) -> bool:
    report = record.report
    if report is None:
        return False
    return bool(grafted_spans(report) or report.healing is not None or "read" in report.timings_ms)


def _between(times: RequestTimes, marks: list[tuple[str, float]]) -> list[Stage]:
    """Each stage lasts until the next begins; those without a name are left out."""
    stages = []
    starts = list(accumulate((max(times.arrival, min(moment, times.ended)) for _, moment in marks), max))
    for (name, _), start, end in zip(marks, starts, [*starts[1:], times.ended], strict=True):
        if name:
            stages.append(Stage(name, start, max(start, end)))
    return stages
