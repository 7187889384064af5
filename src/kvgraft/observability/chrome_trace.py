"""Steps and requests as Chrome trace events, in a JSON file that Perfetto opens."""

from __future__ import annotations

import json
import math
import time
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from kvgraft.errors import ConfigError
from kvgraft.observability.backlog import Backlog
from kvgraft.observability.recorder import IdleRecord, RequestRecord, StepRecord
from kvgraft.observability.request_stages import Stage, grafted_spans, stages_of

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from types import TracebackType
    from typing import Self

    from kvgraft.types import GraftReport, SpanReport

Event = dict[str, Any]


class _Track(NamedTuple):
    """Where events go: Perfetto groups tracks by process, and no two of ours share a number."""

    process: int
    number: int


_STEPS = _Track(1, 10)
_REQUESTS = 2
"""Process of the requests' tracks, which are numbered from `_STEPS` on."""
_MOST_SPANS = 64
"""Spans that a graft's event lists; its arguments say how many there are."""


class ChromeTrace:
    """A `Recorder` that writes a file: a track of the engine's steps, and one for each request that has ended.

    Records are turned into events and written on a thread of their own, four times a second. The file is a JSON array, of
    which only the closing bracket is missing while it is written. Viewers do not mind: a process that is killed leaves a file
    that opens. It holds counts, times and names of requests, never texts.
    """

    def __init__(self, file: Path) -> None:
        """Begin the file; what is there is overwritten.

        Raises:
            ConfigError: It cannot be written.
        """
        try:
            self._file: IO[str] = file.open("w", encoding="utf-8")
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(
                f"trace_out {file} cannot be written: {reason}; give a file in a folder of yours"
            ) from error
        self._origin = time.perf_counter()
        self._last_track = _STEPS.number
        self._separator = "[\n"
        self._put([_name("process_name", _STEPS, "engine"), _name("thread_name", _STEPS, "steps")])
        self._put([_name("process_name", _Track(_REQUESTS, 0), "requests")])
        self._file.flush()
        self._backlog: Backlog[RequestRecord | StepRecord | IdleRecord] = Backlog("trace-out", self._write)

    def __enter__(self) -> Self:
        """Return the recorder itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Write what is left."""
        self.close()

    def record_request(self, record: RequestRecord) -> None:
        """Leave a request to the thread that writes."""
        self._backlog.put(record)

    def record_step(self, record: StepRecord) -> None:
        """Leave a step to the thread that writes."""
        self._backlog.put(record)

    def record_idle(self, record: IdleRecord) -> None:
        """Leave a pass that no request waited for to the thread that writes."""
        self._backlog.put(record)

    def close(self) -> None:
        """Write what is left, and end the file."""
        self._backlog.close()
        if not self._file.closed:
            self._file.write("\n]\n")
            self._file.close()

    # What follows runs on the thread that writes, but for the head of the file.

    def _write(self, records: Iterable[RequestRecord | StepRecord | IdleRecord]) -> None:
        for record in records:
            if isinstance(record, StepRecord):
                self._put([self._step(record)])
            elif isinstance(record, IdleRecord):
                self._put(
                    [self._event(_STEPS, Stage(record.work, record.started, record.started + record.seconds), {})]
                )
            else:
                self._put(self._request(record))
        self._file.flush()

    def _put(self, events: Iterable[Event]) -> None:
        for event in events:
            self._file.write(self._separator + json.dumps(event, separators=(",", ":")))
            self._separator = ",\n"

    def _step(self, record: StepRecord) -> Event:
        rows = {
            "prefill": record.prefill_rows,
            "decode": record.decode_rows,
            "repair": record.repair_rows,
            "heal": record.heal_rows,
        }
        name = " + ".join(kind for kind, count in rows.items() if count) or "no rows"
        values = {f"{kind}_rows": count for kind, count in rows.items()}
        values |= {
            "num_running": record.num_running,
            "num_waiting": record.num_waiting,
            "slots_free": record.slots_free,
            "slots_request": record.slots_request,
            "slots_cached": record.slots_cached,
            "slots_donor": record.slots_donor,
        }
        return self._event(_STEPS, Stage(name, record.started, record.started + record.seconds), values)

    def _request(self, record: RequestRecord) -> list[Event]:
        times = record.times
        if times is None:
            return []
        self._last_track += 1
        track = _Track(_REQUESTS, self._last_track)
        whole = self._event(track, Stage(record.outcome, times.arrival, times.ended), _request_facts(record))
        stages = [self._event(track, stage, _stage_facts(stage.name, record)) for stage in stages_of(record)]
        return [_name("thread_name", track, record.request_id), whole, *stages]

    def _event(self, track: _Track, stage: Stage, facts: Event) -> Event:
        """A complete event; times are microseconds since the trace began, in whole nanoseconds so that stages nest."""
        first, last = (round((moment - self._origin) * 1e9) for moment in (stage.start, stage.end))
        return {
            "name": stage.name,
            "ph": "X",
            "pid": track.process,
            "tid": track.number,
            "ts": first / 1e3,
            "dur": max(0, last - first) / 1e3,
            "args": facts,
        }


def _name(kind: str, track: _Track, name: str) -> Event:
    """An event that names a track (`thread_name`) or its process (`process_name`)."""
    return {"name": kind, "ph": "M", "pid": track.process, "tid": track.number, "args": {"name": name}}


def _request_facts(record: RequestRecord) -> Event:
    facts: Event = {
        "request_id": record.request_id,
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
        "preemptions": record.num_preemptions,
    }
    report = record.report
    return facts if report is None else facts | _report_facts(report)


def _report_facts(report: GraftReport) -> Event:
    facts: Event = {
        "exact_tokens": int(report.exact_tokens),
        "continued_tokens": int(report.continued_tokens),
        "shifted_tokens": int(report.shifted_tokens),
        "substituted_tokens": int(report.substituted_tokens),
        "recomputed_tokens": int(report.recomputed_tokens),
        "corrected_tokens": int(report.corrected_tokens),
        "computed_tokens": int(report.computed_tokens),
        "spans": len(report.spans),
        "donors": report.num_donors,
        "policy": report.policy,
        "miss": None if report.miss is None else report.miss.reason.value,
        "timings_ms": {step: value for step, value in report.timings_ms.items() if math.isfinite(value)},
    }
    if report.healing is not None:
        facts["drafted_tokens"] = int(report.healing.drafted_tokens)
        facts["retracted_tokens"] = int(report.healing.retracted_tokens)
    return facts


def _stage_facts(stage: str, record: RequestRecord) -> Event:
    report = record.report
    if stage == "decode":
        return {"output_tokens": record.output_tokens}
    if report is None:
        return {}
    if stage == "graft":
        spans = grafted_spans(report)
        return {"num_spans": len(spans), "spans": [_span_facts(span) for span in spans[:_MOST_SPANS]]}
    return {"computed_tokens": int(report.computed_tokens)} if stage == "prefill" else {}


def _span_facts(span: SpanReport) -> Event:
    return {
        "target_start": int(span.target_start),
        "length": int(span.length),
        "donor_id": int(span.donor_id),
        "donor_start": int(span.donor_start),
        "fidelity": span.fidelity.value,
        "generation": int(span.generation),
        "tier": span.tier,
    }
