from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.test_imports import HIDE
from tests.unit.observability.otel.exchanges import make_exchange
from tests.unit.observability.records import make_record

from kvgraft.errors import ConfigError
from kvgraft.observability.otel.tracing import RequestTraces, WatchedExporter, open_traces, traces_url


class Collector(SpanExporter):
    """Takes spans, or does what a test tells it to."""

    def __init__(self):
        self.result = SpanExportResult.SUCCESS
        self.error = None

    def export(self, spans):
        if self.error is not None:
            raise self.error
        return self.result

    def shutdown(self):
        pass


@pytest.fixture(autouse=True)
def _loud_sdk():
    """`open_traces` silences the SDK for the rest of the process."""
    yield
    logging.getLogger("opentelemetry").setLevel(logging.NOTSET)


def test_records_become_spans_at_the_latest_in_the_end():
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with RequestTraces(provider, "my-model") as traces:
        traces.record_exchange(make_exchange(choices=(("answer-0", 0), ("refused", 0))))
        traces.record_request(make_record())
    names = [span.name for span in exporter.get_finished_spans()]
    assert names == ["queue", "lookup", "graft", "prefill", "decode", "chat my-model"]


def test_collector_that_is_down_is_told_of_once_and_again_when_it_is_back(caplog):
    collector = Collector()
    watched = WatchedExporter(collector, "http://me:secret@collector:4318")
    with caplog.at_level(logging.INFO):
        watched.export([])
        collector.result = SpanExportResult.FAILURE
        assert watched.export([]) is SpanExportResult.FAILURE
        collector.error = OSError("no route")
        assert watched.export([]) is SpanExportResult.FAILURE
        collector.error, collector.result = None, SpanExportResult.SUCCESS
        assert watched.export([]) is SpanExportResult.SUCCESS
    down, back = [record.getMessage() for record in caplog.records]
    assert down.startswith("spans do not reach http://***@collector:4318 and are dropped; requests go on.")
    assert back == "spans reach http://***@collector:4318 again"


def test_nobody_waits_for_a_collector_that_is_down(monkeypatch, caplog):
    """A port that refuses, and spans to send: the end comes all the same, with one warning at most."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        traces = open_traces(f"http://127.0.0.1:{unused.getsockname()[1]}", "my-model")
        traces.record_exchange(make_exchange())
        traces.record_request(make_record())
        traces.close()
    assert len(caplog.records) <= 1


class Listener:
    """A collector that keeps what is posted to it."""

    def __init__(self):
        self.posts = posts = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                posts.append((self.path, dict(self.headers), self.rfile.read(int(self.headers["content-length"]))))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_):
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def send_one(url):
    with open_traces(url, "my-model") as traces:
        traces.record_exchange(make_exchange())
        traces.record_request(make_record())


def test_collector_gets_the_spans_with_the_headers_of_the_variables(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=hush")
    with Listener() as listener:
        send_one(listener.url)
    ((path, headers, body),) = listener.posts
    assert (path, headers["x-key"]) == ("/v1/traces", "hush")
    request = ExportTraceServiceRequest.FromString(body)
    spans = request.resource_spans[0].scope_spans[0].spans
    assert [span.name for span in spans] == ["queue", "lookup", "graft", "prefill", "decode", "chat my-model"]


def test_what_the_sampler_leaves_out_is_not_sent(monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    with Listener() as listener:
        send_one(listener.url)
    assert listener.posts == []


def test_variables_of_the_sdk_name_the_service(monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "tier-two")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    with open_traces("http://127.0.0.1:9", "my-model") as traces:
        attributes = traces._provider.resource.attributes
    assert attributes["service.name"] == "tier-two"
    assert attributes["deployment.environment.name"] == "test"
    assert "service.version" in attributes


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("http://collector:4318/", "http://collector:4318/v1/traces"),
        ("https://host/otel/v1/traces", "https://host/otel/v1/traces"),
    ],
)
def test_endpoint_without_a_path_gets_the_usual_one(endpoint, url):
    assert traces_url(endpoint) == url


@pytest.mark.parametrize("endpoint", ["http://[::1", "http://me:s3cret@ho\u2100st:4318"])
def test_endpoint_that_is_no_url_is_refused_without_its_password(endpoint):
    with pytest.raises(
        ConfigError, match="otlp_endpoint is no URL; write one such as http://localhost:4318"
    ) as refused:
        traces_url(endpoint)
    assert "s3cret" not in str(refused.value)


def test_missing_extra_is_named():
    code = HIDE.format(hidden={"opentelemetry"}) + "import kvgraft.observability.otel.tracing"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.stderr.strip().endswith(
        "ImportError: otlp_endpoint needs opentelemetry: pip install 'kvgraft[otel]'"
    ), found.stderr
