from __future__ import annotations

import time

import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from tests.unit.observability.otel.exchanges import make_exchange
from tests.unit.observability.records import GOES_ON, SPAN, make_continued_report, make_record, make_report, make_times

from kvgraft.observability.otel.spans import SpanWriter
from kvgraft.types import Fidelity, Miss, MissReason, RepairReport, RepairTime, SpanReport

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def written():
    """Write an exchange; returns its server span and those below it, None if there are none."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    writer = SpanWriter(provider.get_tracer("test"), "my-model")

    def write(exchange, *records):
        exporter.clear()
        writer.write(exchange, records)
        *stages, server = exporter.get_finished_spans() or [None]
        return server, stages

    yield write
    provider.shutdown()


def test_server_span_and_its_stages(written):
    server, stages = written(make_exchange(), make_record())
    assert (server.name, server.kind, server.parent) == ("chat my-model", SpanKind.SERVER, None)
    assert [stage.name for stage in stages] == ["queue", "lookup", "graft", "prefill", "decode"]
    assert {stage.parent.span_id for stage in stages} == {server.context.span_id}
    assert {stage.context.trace_id for stage in stages} == {server.context.trace_id}
    assert server.end_time - server.start_time == 11 * 10**9
    assert [stage.end_time - stage.start_time for stage in stages] == [n * 10**9 for n in (1, 1, 1, 2, 4)]
    assert stages[0].start_time - server.start_time == 10**9


def test_times_are_those_of_the_wall_clock(written):
    now = time.perf_counter()
    server, _ = written(make_exchange(started=now - 5, ended=now, asked=None))
    assert abs(server.end_time - time.time_ns()) < 60 * 10**9


def test_tokens_are_told_by_the_names_of_the_conventions(written):
    server, _ = written(make_exchange(), make_record())
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "kvgraft",
        "gen_ai.request.model": "my-model",
        "gen_ai.response.id": "answer",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.request.max_tokens": 16,
        "gen_ai.request.choice.count": 1,
        "gen_ai.usage.input_tokens": 100,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 10,
        "http.response.status_code": 200,
        "kvgraft.request.id": "r-1",
        "kvgraft.reuse.shifted_tokens": 45,
        "kvgraft.reuse.computed_tokens": 45,
        "kvgraft.reuse.class": "shifted",
        "kvgraft.selection": "query_seam",
    }
    assert expected.items() <= dict(server.attributes).items()
    assert not {"kvgraft.miss.reason", "kvgraft.repair.time"} & set(server.attributes)


def test_repairs_say_when_they_came(written):
    before, after = (
        make_record(report=make_report(repair=RepairReport(time))) for time in (RepairTime.BEFORE, RepairTime.AFTER)
    )
    server, _ = written(make_exchange(), after)
    assert server.attributes["kvgraft.repair.time"] == "after"
    server, _ = written(make_exchange(), before)
    assert server.attributes["kvgraft.repair.time"] == "before"


def test_miss_says_why(written):
    server, stages = written(
        make_exchange(), make_record(report=make_report(spans=(), miss=Miss(MissReason.NO_MATCH, "because of hush")))
    )
    assert server.attributes["kvgraft.miss.reason"] == "no_match"
    assert stages[1].attributes["kvgraft.miss.reason"] == "no_match"
    assert "kvgraft.reuse.class" not in server.attributes
    assert "hush" not in str([span.to_json() for span in (server, *stages)])


def test_prompts_count_once_and_outputs_of_all_choices(written):
    choices = (("answer-0", 0), ("answer-1", 0), ("answer-2", 1), ("answer-3", 1))
    records = [make_record(name, prompt_tokens=100 + index) for name, index in choices]
    server, stages = written(make_exchange(choices=choices), *records)
    assert server.attributes["gen_ai.usage.input_tokens"] == 201
    assert server.attributes["gen_ai.usage.output_tokens"] == 16
    assert server.attributes["gen_ai.usage.cache_read.input_tokens"] == 20
    assert server.attributes["gen_ai.request.choice.count"] == 2
    assert [stage.attributes["kvgraft.choice.index"] for stage in stages[::5]] == [0, 1, 2, 3]
    assert not any(name.startswith("gen_ai.usage") for stage in stages for name in stage.attributes)


def test_answer_without_output_counts_none(written):
    server, _ = written(make_exchange(has_output=False), make_record(output_tokens=1))
    assert server.attributes["gen_ai.usage.output_tokens"] == 0


def test_each_reused_span_is_an_event_of_the_graft(written):
    other = SpanReport(70, 20, 7, 90, -20, Fidelity.SHIFTED, 1)
    server, stages = written(make_exchange(), make_record(report=make_report(spans=(SPAN, other))))
    first, second = stages[2].events
    assert {first.name, second.name} == {"kvgraft.graft"}
    assert dict(first.attributes)["kvgraft.graft.tokens"] == 50
    assert dict(second.attributes)["kvgraft.graft.position_delta"] == -20
    assert server.attributes["kvgraft.reuse.class"] == "composed"


def test_what_a_prompt_goes_on_from_is_counted_and_is_no_graft(written):
    server, stages = written(make_exchange(), make_record(report=make_continued_report()))
    told = server.attributes
    assert (told["kvgraft.reuse.continued_tokens"], told["gen_ai.usage.cache_read.input_tokens"]) == (50, 10)
    assert told["kvgraft.reuse.class"] == "continued"
    assert "kvgraft.graft.ms" not in {name for stage in stages for name in stage.attributes}
    server, stages = written(make_exchange(), make_record(report=make_report(spans=(GOES_ON, SPAN))))
    assert server.attributes["kvgraft.reuse.class"] == "shifted"
    assert len(stages[2].events) == 1


def test_client_names_the_parent(written):
    server, stages = written(make_exchange(traceparent=f"00-{TRACE}-{PARENT}-01", tracestate="vendor=x"), make_record())
    assert f"{server.context.trace_id:032x}" == TRACE
    assert f"{server.parent.span_id:016x}" == PARENT
    assert server.parent.is_remote
    assert server.context.trace_state["vendor"] == "x"
    assert f"{stages[0].context.trace_id:032x}" == TRACE


@pytest.mark.parametrize("header", ["nonsense", "00-0-0-00", f"ff-{TRACE}-{PARENT}-01"])
def test_wrong_parent_begins_a_trace(written, header):
    server, _ = written(make_exchange(traceparent=header, tracestate="=,="), make_record())
    assert server.parent is None


def test_parent_that_is_not_sampled_samples_nothing(written):
    assert written(make_exchange(traceparent=f"00-{TRACE}-{PARENT}-00"), make_record()) == (None, [])


@pytest.mark.parametrize(
    ("status", "error", "code", "kind"),
    [
        (500, "server_error", StatusCode.ERROR, "server_error"),
        (200, "ValueError", StatusCode.ERROR, "ValueError"),
        (429, "rate_limit_exceeded", StatusCode.UNSET, "rate_limit_exceeded"),
        (None, "client_disconnected", StatusCode.UNSET, "client_disconnected"),
        (200, None, StatusCode.UNSET, None),
    ],
)
def test_errors_of_the_server_are_the_status(written, status, error, code, kind):
    server, _ = written(make_exchange(status=status, error=error))
    assert server.status.status_code is code
    assert server.attributes.get("error.type") == kind
    assert server.attributes.get("http.response.status_code") == status


def test_stage_in_which_the_engine_failed_has_the_status(written):
    record = make_record(outcome="error", report=None, times=make_times(first_token=None))
    _, stages = written(make_exchange(status=500, error="server_error"), record)
    assert [(stage.name, stage.status.status_code) for stage in stages[-2:]] == [
        ("lookup", StatusCode.UNSET),
        ("prefill", StatusCode.ERROR),
    ]
