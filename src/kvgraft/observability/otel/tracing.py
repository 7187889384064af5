"""From records to a collector: spans are made on one thread and sent by another, neither of which a request waits for."""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kvgraft import __version__
from kvgraft.config.setting import without_password
from kvgraft.errors import ConfigError
from kvgraft.observability.backlog import Backlog
from kvgraft.observability.otel.joining import Joining

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType
    from typing import Self

    from kvgraft.observability.otel.exchange import Exchange
    from kvgraft.observability.recorder import IdleRecord, RequestRecord, StepRecord

try:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

    from kvgraft.observability.otel.spans import SpanWriter
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] == "opentelemetry":
        raise ImportError("otlp_endpoint needs opentelemetry: pip install 'kvgraft[otel]'", name=error.name) from error
    raise

logger = logging.getLogger(__name__)

_TRACES_PATH = "/v1/traces"
_END_S = 3.0
"""How long the end of a server may wait for a collector."""


class RequestTraces:
    """A `Recorder` that makes spans; `record_exchange` adds the HTTP requests. Both return at once, on any thread."""

    def __init__(self, provider: TracerProvider, model: str) -> None:
        """Write spans of `model`, its name in the API, with `provider`, which is shut down by `close`."""
        self._provider = provider
        self._writer = SpanWriter(provider.get_tracer("kvgraft", __version__), model)
        self._joining = Joining()
        self._backlog: Backlog[Exchange | RequestRecord] = Backlog("traces", self._take)

    def __enter__(self) -> Self:
        """Return the recorder itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Send what is left."""
        self.close()

    def record_exchange(self, exchange: Exchange) -> None:
        """Take in an HTTP request that has ended; its spans are made when its choices have ended, too."""
        self._backlog.put(exchange)

    def record_request(self, record: RequestRecord) -> None:
        """Take in a choice that has ended."""
        self._backlog.put(record)

    def record_step(self, record: StepRecord) -> None:
        """Ignore what a step did: it belongs to several requests."""

    def record_idle(self, record: IdleRecord) -> None:
        """Ignore work of idle time."""

    def close(self) -> None:
        """Send what is left, and wait a few seconds for a collector that does not answer, no longer."""
        self._backlog.close()
        self._write(math.inf)
        ending = threading.Thread(target=self._provider.shutdown, name="kvgraft-traces-end", daemon=True)
        ending.start()
        ending.join(_END_S)

    def _take(self, batch: list[Exchange | RequestRecord]) -> None:
        for item in batch:
            self._joining.add(item)
        self._write(time.perf_counter())

    def _write(self, now: float) -> None:
        for exchange, records in self._joining.joined(now):
            self._writer.write(exchange, records)


def open_traces(endpoint: str, model: str) -> RequestTraces:
    """Return a recorder that sends spans over OTLP/HTTP; the SDK reads its own variables, `OTEL_*`, for all else.

    What a collector does not take waits in the SDK's queue of `OTEL_BSP_MAX_QUEUE_SIZE` spans, and the oldest are dropped.

    Args:
        endpoint: URL of a collector, such as `http://localhost:4318`; with a path that is asked, otherwise `/v1/traces`.
        model: Its name in the API.

    Raises:
        ConfigError: `endpoint` is no URL.
    """
    exporter = WatchedExporter(OTLPSpanExporter(endpoint=traces_url(endpoint)), endpoint)
    provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    # What is wrong with variables has been said by now; `WatchedExporter` reports a collector that is down, once.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    return RequestTraces(provider, model)


def traces_url(endpoint: str) -> str:
    """Return where spans are posted to: a URL without a path gets the usual one.

    Raises:
        ConfigError: It is no URL.
    """
    try:
        path = urlsplit(endpoint).path
    except ValueError:
        # The message of urllib may hold a password.
        raise ConfigError("otlp_endpoint is no URL; write one such as http://localhost:4318") from None
    return endpoint if path not in ("", "/") else endpoint.rstrip("/") + _TRACES_PATH


def _resource() -> Resource:
    """Who sends: variables of the SDK may call it something else."""
    ours = Resource({"service.name": "kvgraft", "service.version": __version__})
    return Resource.create(dict(ours.merge(OTELResourceDetector().detect()).attributes))


class WatchedExporter(SpanExporter):
    """Says once that a collector does not take spans, and once that it does again. Spans that it did not take are lost."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        """Pass spans on to `exporter`; messages name `endpoint`, without a password."""
        self._exporter = exporter
        self._endpoint = without_password(endpoint)
        self._is_down = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Pass a batch on; never raises."""
        try:
            result = self._exporter.export(spans)
        except Exception:  # noqa: BLE001 - a collector's failures harm no request
            result = SpanExportResult.FAILURE
        is_down = result is not SpanExportResult.SUCCESS
        if is_down and not self._is_down:
            logger.warning("spans do not reach %s and are dropped; requests go on. Check otlp_endpoint", self._endpoint)
        elif self._is_down and not is_down:
            logger.info("spans reach %s again", self._endpoint)
        self._is_down = is_down
        return result

    def shutdown(self) -> None:
        """End the exporter: a retry that waits is given up."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Have the exporter send what it holds."""
        return self._exporter.force_flush(timeout_millis)
