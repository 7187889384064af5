"""Records as Prometheus metrics, `kvgraft:*`. Labels are few and fixed: never a tenant or a request."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from kvgraft.observability.report import token_kinds
from kvgraft.types import MissReason

try:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    if error.name == "prometheus_client":
        raise ImportError(
            "kvgraft.observability.prometheus needs prometheus_client: pip install 'kvgraft[server]'", name=error.name
        ) from error
    raise

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvgraft.observability.recorder import RequestRecord, StepRecord
    from kvgraft.types import GraftReport

_LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300)
_QUICK_S = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.5, 1)
_REJECTED = {MissReason.NOT_WORTH_IT, MissReason.MODEL_REFUSED, MissReason.NO_ROOM}
_HOLDERS = ("free", "request", "cached", "donor")

M = TypeVar("M", Counter, Gauge, Histogram)


class PrometheusRecorder:
    """A `Recorder` that keeps metrics in a registry of its own. Safe to read from any thread."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens by how they came about", "kind", "outcome")
        self._generated = self._counter("generation_tokens", "Tokens generated")
        self._requests = self._counter("requests", "Requests that ended", "outcome")
        self._misses = self._counter("graft_misses", "Requests without a graft, and why", "reason")
        self._preemptions = self._counter("num_preemptions", "Times a request lost its slots and was computed again")
        self._errors = self._counter("graft_errors", "Lookups and grafts that failed and became misses")
        self._steps = self._counter("steps", "Forward passes")
        self._rows = self._counter("step_rows", "Rows of forward passes", "phase")
        self._responses = self._counter("http_responses", "HTTP responses", "endpoint", "status")
        self._ttft = self._histogram("time_to_first_token_seconds", "From arrival to the first token")
        self._tpot = self._histogram("time_per_output_token_seconds", "Between tokens, mean of a request")
        self._e2e = self._histogram("e2e_request_latency_seconds", "From arrival to the end")
        self._queue = self._histogram("request_queue_time_seconds", "From arrival to admission")
        self._step_time = self._histogram("step_seconds", "Duration of a step")
        self._lookup = self._histogram("lookup_seconds", "Finding and planning reuse", _QUICK_S)
        self._graft = self._histogram("graft_seconds", "Copying and rotating K/V", _QUICK_S)
        self._running = self._gauge("num_requests_running", "Admitted requests")
        self._waiting = self._gauge("num_requests_waiting", "Requests that wait for admission")
        self._slots = self._gauge("kv_slots", "K/V slots by holder", "holder")
        self._donors = self._gauge("donors", "Donors in all tiers")
        self._host_bytes = self._gauge("donor_host_bytes", "Bytes of donors in host memory")
        self._last_errors = 0

    def record_request(self, record: RequestRecord) -> None:
        """Count a request that ended."""
        self._requests.labels(record.outcome, self._model_name).inc()
        self._generated.labels(self._model_name).inc(record.output_tokens)
        self._preemptions.labels(self._model_name).inc(record.num_preemptions)
        self._e2e.labels(self._model_name).observe(record.total_s)
        if record.queue_s is not None:
            self._queue.labels(self._model_name).observe(record.queue_s)
        if record.ttft_s is not None:
            self._ttft.labels(self._model_name).observe(record.ttft_s)
            if record.output_tokens > 1:
                self._tpot.labels(self._model_name).observe(
                    (record.total_s - record.ttft_s) / (record.output_tokens - 1)
                )
        if record.report is not None:
            self._record_report(record.report)

    def record_step(self, record: StepRecord) -> None:
        """Count a step and take over the state behind it."""
        self._steps.labels(self._model_name).inc()
        self._step_time.labels(self._model_name).observe(record.seconds)
        self._rows.labels("prefill", self._model_name).inc(record.prefill_rows)
        self._rows.labels("decode", self._model_name).inc(record.decode_rows)
        self.set_load(record.num_running, record.num_waiting)
        self.set_memory(
            (record.slots_free, record.slots_request, record.slots_cached, record.slots_donor),
            record.num_donors,
            record.host_bytes,
        )

    def record_response(self, endpoint: str, status: int) -> None:
        """Count an HTTP response; `endpoint` is a route, never a path that a client made up."""
        self._responses.labels(endpoint, str(status), self._model_name).inc()

    def set_load(self, num_running: int, num_waiting: int) -> None:
        """Take over how many requests there are."""
        self._running.labels(self._model_name).set(num_running)
        self._waiting.labels(self._model_name).set(num_waiting)

    def set_memory(self, slots: tuple[int, int, int, int], num_donors: int, host_bytes: int) -> None:
        """Take over who holds what; `slots` are free, request, cached, donor."""
        for holder, count in zip(_HOLDERS, slots, strict=True):
            self._slots.labels(holder, self._model_name).set(count)
        self._donors.labels(self._model_name).set(num_donors)
        self._host_bytes.labels(self._model_name).set(host_bytes)

    def set_errors(self, num_errors: int) -> None:
        """Take over the engine's count of failed lookups and grafts."""
        self._errors.labels(self._model_name).inc(max(0, num_errors - self._last_errors))
        self._last_errors = max(self._last_errors, num_errors)

    def exposition(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return generate_latest(_WithoutCreated(self.registry))

    def _record_report(self, report: GraftReport) -> None:
        outcome = token_outcome(report)
        for kind, count in token_kinds(report).items():
            self._prompt_tokens.labels(kind, outcome, self._model_name).inc(count)
        if report.miss is not None:
            self._misses.labels(report.miss.reason.value, self._model_name).inc()
        for step, histogram in (("lookup", self._lookup), ("graft", self._graft)):
            if step in report.timings_ms:
                histogram.labels(self._model_name).observe(report.timings_ms[step] / 1e3)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return self._ready(Counter(f"kvgraft:{name}", text, (*labels, "model_name"), registry=self.registry), labels)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return self._ready(Gauge(f"kvgraft:{name}", text, (*labels, "model_name"), registry=self.registry), labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = _LATENCY_S) -> Histogram:
        metric = Histogram(f"kvgraft:{name}", text, ("model_name",), registry=self.registry, buckets=buckets)
        return self._ready(metric, ())

    def _ready(self, metric: M, labels: tuple[str, ...]) -> M:
        """Show a metric without labels of its own as 0 from the start."""
        if not labels:
            metric.labels(self._model_name)
        return metric


class _WithoutCreated(Collector):
    """A registry without the `_created` series that the client library adds to each counter and nobody reads."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


def token_outcome(report: GraftReport) -> str:
    """Return how a request's tokens relate to a full prefill.

    `approx`: some were grafted. `fallback`: reuse failed. `rejected`: a match was found or looked for and refused.
    `exact`: the rest.
    """
    if report.shifted_tokens or report.substituted_tokens:
        return "approx"
    if report.miss is not None and report.miss.reason is MissReason.ERROR:
        return "fallback"
    if report.miss is not None and report.miss.reason in _REJECTED:
        return "rejected"
    return "exact"
