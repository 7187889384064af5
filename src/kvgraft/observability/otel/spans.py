"""Write the spans of an exchange that is over: one of the server, and below it the stages of each choice."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvgraft.observability.otel.attributes import (
    graft_attributes,
    operation_of,
    server_attributes,
    stage_attributes,
)
from kvgraft.observability.request_stages import grafted_spans, stages_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer

    from kvgraft.observability.otel.exchange import Exchange
    from kvgraft.observability.recorder import RequestRecord

_MOST_EVENTS = 64
"""Events of a graft's span, one per copied span of text; the attribute `kvgraft.reuse.spans` counts all of them."""


class SpanWriter:
    """Makes spans with the times that were recorded. Not thread-safe."""

    def __init__(self, tracer: Tracer, model: str) -> None:
        """Write spans of `model`, its name in the API, with `tracer`."""
        self._tracer = tracer
        self._model = model
        self._propagator = TraceContextTextMapPropagator()

    def write(self, exchange: Exchange, records: Sequence[RequestRecord]) -> None:
        """Write one exchange: below the span that its client named, if it named one."""
        clock = _Clock()
        span = self._tracer.start_span(
            f"{operation_of(exchange.route)} {self._model}",
            context=self._parent(exchange),
            kind=SpanKind.SERVER,
            attributes=server_attributes(exchange, records, self._model),
            start_time=clock.unix_ns(exchange.started),
        )
        if exchange.has_failed:
            span.set_status(Status(StatusCode.ERROR, exchange.error))
        if span.is_recording():
            inside = set_span_in_context(span)
            for index, record in enumerate(records):
                self._write_stages(inside, clock, index, record)
        span.end(clock.unix_ns(exchange.ended))

    def _parent(self, exchange: Exchange) -> Context:
        headers = {"traceparent": exchange.traceparent, "tracestate": exchange.tracestate}
        return self._propagator.extract({name: value for name, value in headers.items() if value})

    def _write_stages(self, inside: Context, clock: _Clock, index: int, record: RequestRecord) -> None:
        stages = stages_of(record)
        for stage in stages:
            span = self._tracer.start_span(
                stage.name,
                context=inside,
                attributes=stage_attributes(stage.name, index, record),
                start_time=clock.unix_ns(stage.start),
            )
            if stage.name == "graft":
                _add_grafts(span, record, clock.unix_ns(stage.end))
            if stage is stages[-1] and record.outcome == "error":
                span.set_status(Status(StatusCode.ERROR))
            span.end(clock.unix_ns(stage.end))


def _add_grafts(span: Span, record: RequestRecord, moment: int) -> None:
    copies = () if record.report is None else grafted_spans(record.report)
    for copied in copies[:_MOST_EVENTS]:
        span.add_event("kvgraft.graft", graft_attributes(copied), moment)


class _Clock:
    """Turns `time.perf_counter()` into nanoseconds since 1970, by one comparison of the two clocks."""

    def __init__(self) -> None:
        self._offset = time.time_ns() - time.perf_counter_ns()

    def unix_ns(self, moment: float) -> int:
        return self._offset + int(moment * 1e9)
