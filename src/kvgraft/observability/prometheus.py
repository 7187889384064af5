"""Records as Prometheus metrics, `kvgraft:*`, and what the process is and takes. Labels are few: never a tenant or a request.

Prometheus keeps colons for the names of recording rules, and its linter says so. vLLM and SGLang have them in all their
names nevertheless (`vllm:num_requests_running`), and what their dashboards and autoscalers ask of an engine is asked of this
one by another word in front. What is no engine's, `kvgraft_build_info` and `process_*`, is named as everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from kvgraft.observability.process import build_info, process_memory
from kvgraft.reuse.metrics import (
    DONOR_HOST_BYTES,
    DONOR_HOST_LIMIT_BYTES,
    DONOR_TOKENS,
    DONORS,
    GRAFT_ERRORS,
    GRAFT_REFUSED,
    LATENCY_S,
    METRICS,
    PROPOSALS,
    RISK_AUDITS,
    RISK_CERTIFIED,
    SEMANTIC_CALLS,
    MetricKind,
    samples,
)
from kvgraft.reuse.risk_samples import risk_samples
from kvgraft.reuse.store_samples import StoreSamples

try:
    from prometheus_client import (
        CollectorRegistry,
        Counter,
        Gauge,
        Histogram,
        Metric,
        ProcessCollector,
        generate_latest,
    )
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    if error.name == "prometheus_client":
        raise ImportError(
            "kvgraft.observability.prometheus needs prometheus_client: pip install 'kvgraft[server]'", name=error.name
        ) from error
    raise

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from prometheus_client.samples import Sample

    from kvgraft.observability.recorder import IdleRecord, RequestRecord, StepRecord
    from kvgraft.reuse.metrics import Metric as ReuseMetric
    from kvgraft.types import RiskStatement, StoreCounts

_HOLDERS = ("free", "request", "cached", "donor")

M = TypeVar("M", Counter, Gauge, Histogram)


class PrometheusRecorder:
    """A `Recorder` that keeps metrics in a registry of its own. Safe to read from any thread."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        versions = build_info()
        build = Gauge(
            "kvgraft_build_info",
            "1, and what this server was built of",
            (*versions, "model_name"),
            registry=self.registry,
        )
        build.labels(**versions, model_name=model_name).set(1)
        ProcessCollector(registry=self.registry)
        self._reuse = {metric: self._made(metric) for metric in METRICS}
        self._generated = self._counter("generation_tokens", "Tokens generated")
        self._requests = self._counter(
            "requests",
            "Requests that ended. outcome: stop, length, abort, error, refused (what was asked for is impossible)",
            "outcome",
        )
        self._preemptions = self._counter("num_preemptions", "Times a request lost its slots and was computed again")
        self._steps = self._counter("steps", "Forward passes")
        self._rows = self._counter(
            "step_rows",
            "Rows of forward passes. phase: prefill, decode, repair (computed exactly beside a decode row, `repair_rows`), "
            "heal (of answers that ended, beside others)",
            "phase",
        )
        self._responses = self._counter("http_responses", "HTTP responses", "endpoint", "status")
        self._ttft = self._histogram("time_to_first_token_seconds", "From arrival to the first token")
        self._tpot = self._histogram("time_per_output_token_seconds", "Between tokens, mean of a request")
        self._e2e = self._histogram("e2e_request_latency_seconds", "From arrival to the end")
        self._queue = self._histogram("request_queue_time_seconds", "From arrival to admission")
        self._step_time = self._histogram("step_seconds", "Duration of a step")
        self._running = self._gauge("num_requests_running", "Admitted requests")
        self._waiting = self._gauge("num_requests_waiting", "Requests that wait for admission")
        self._slots = self._gauge("kv_slots", "K/V slots on the device. holder: free, request, cached, donor", "holder")
        self._pool_used = self._gauge(
            "memory_used_bytes", "Bytes in use. pool: kv, host_donors, host_prefixes, process", "pool"
        )
        self._pool_limit = self._gauge("memory_limit_bytes", "Bytes that a pool may take", "pool")
        self._host_prefixes = self._gauge("prefix_host_tokens", "Tokens of exact prefixes in host memory")
        self._sessions = self._gauge("sessions", "Open sessions")
        self._kept = self._gauge("session_kv_slots", "K/V slots that are kept for sessions")
        self._heal_candidates = self._gauge("heal_candidates", "Texts of grafted requests that wait to be healed")
        self._healed_tokens = self._counter(
            "healed_tokens", "Tokens computed exactly after the answer, where grafts were"
        )
        self._healed_requests = self._counter("healed_requests", "Grafted requests whose K/V were healed to their end")
        self._heals_dropped = self._counter(
            "heals_dropped",
            "Grafted requests that were not healed. reason: too_many, no_room, evicted, error, reset",
            "reason",
        )
        self._last_heals: dict[str, int] = {}
        self._last_errors = 0
        self._last_counts: dict[tuple[ReuseMetric, str], int] = {}
        self._stores = StoreSamples()

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
            for metric, labels, value in samples(record.report):
                family = self._reuse[metric].labels(*labels, self._model_name)
                family.observe(value) if metric.kind is MetricKind.HISTOGRAM else family.inc(value)

    def record_step(self, record: StepRecord) -> None:
        """Count a step and take over the state after it."""
        self._steps.labels(self._model_name).inc()
        self._step_time.labels(self._model_name).observe(record.seconds)
        self._rows.labels("prefill", self._model_name).inc(record.prefill_rows)
        self._rows.labels("decode", self._model_name).inc(record.decode_rows)
        self._rows.labels("repair", self._model_name).inc(record.repair_rows)
        self._rows.labels("heal", self._model_name).inc(record.heal_rows)
        self.set_load(record.num_running, record.num_waiting)
        self.set_memory(
            (record.slots_free, record.slots_request, record.slots_cached, record.slots_donor),
            record.num_donors,
            record.donor_tokens,
            record.host_bytes,
        )
        self.set_host_prefixes(record.prefix_host_tokens)
        self.set_sessions(record.num_sessions, record.slots_kept)

    def record_idle(self, record: IdleRecord) -> None:
        """Ignore a pass that no request waited for: `set_healing` and `set_risk` count what comes of them."""

    def record_response(self, endpoint: str, status: int) -> None:
        """Count an HTTP response; `endpoint` is a route, never a path that a client made up."""
        self._responses.labels(endpoint, str(status), self._model_name).inc()

    def set_load(self, num_running: int, num_waiting: int) -> None:
        """Take over how many requests there are."""
        self._running.labels(self._model_name).set(num_running)
        self._waiting.labels(self._model_name).set(num_waiting)

    def set_memory(self, slots: tuple[int, int, int, int], num_donors: int, donor_tokens: int, host_bytes: int) -> None:
        """Take over who holds what; `slots` are free, request, cached, donor."""
        for holder, count in zip(_HOLDERS, slots, strict=True):
            self._slots.labels(holder, self._model_name).set(count)
        for metric, value in ((DONORS, num_donors), (DONOR_TOKENS, donor_tokens), (DONOR_HOST_BYTES, host_bytes)):
            self._reuse[metric].labels(self._model_name).set(value)

    def set_pools(self, pools: Mapping[str, tuple[int, int]]) -> None:
        """Take over bytes in use and their limit by pool, and look at those of the process."""
        process = process_memory()
        if process.resident_bytes is not None:
            pools = {**pools, "process": (process.resident_bytes, process.limit_bytes)}
        for pool, (used, limit) in pools.items():
            self._pool_used.labels(pool, self._model_name).set(used)
            self._pool_limit.labels(pool, self._model_name).set(limit)

    def set_donor_host_limit(self, num_bytes: int) -> None:
        """Take over how many bytes of host memory donors may take."""
        self._reuse[DONOR_HOST_LIMIT_BYTES].labels(self._model_name).set(num_bytes)

    def set_refused(self, *, is_refused: bool) -> None:
        """Take over whether the self-check refuses grafts."""
        self._reuse[GRAFT_REFUSED].labels(self._model_name).set(is_refused)

    def set_host_prefixes(self, num_tokens: int) -> None:
        """Take over how many tokens of exact prefixes lie in host memory."""
        self._host_prefixes.labels(self._model_name).set(num_tokens)

    def set_sessions(self, num_sessions: int, slots_kept: int) -> None:
        """Take over how many sessions are open, and how many slots are kept for them."""
        self._sessions.labels(self._model_name).set(num_sessions)
        self._kept.labels(self._model_name).set(slots_kept)

    def set_errors(self, num_errors: int) -> None:
        """Take over the engine's count of failed lookups and grafts."""
        self._reuse[GRAFT_ERRORS].labels(self._model_name).inc(max(0, num_errors - self._last_errors))
        self._last_errors = max(self._last_errors, num_errors)

    def set_proposals(self, counts: Mapping[str, int]) -> None:
        """Take over the engine's counts of proposed donors."""
        self._set_counts(PROPOSALS, counts)

    def set_semantic_calls(self, counts: Mapping[str, int]) -> None:
        """Take over the engine's counts of calls of a semantic provider, by outcome."""
        self._set_counts(SEMANTIC_CALLS, counts)

    def _set_counts(self, metric: ReuseMetric, counts: Mapping[str, int]) -> None:
        """Take over the engine's counts of a counter with one label."""
        for name, count in counts.items():
            new = count - self._last_counts.get((metric, name), 0)
            self._reuse[metric].labels(name, self._model_name).inc(max(0, new))
            self._last_counts[metric, name] = count

    def set_healing(self, num_candidates: int, num_tokens: int, num_requests: int, dropped: Mapping[str, int]) -> None:
        """Take over the engine's counts of healing."""
        self._heal_candidates.labels(self._model_name).set(num_candidates)
        self._healed_tokens.labels(self._model_name).inc(self._new_heals("tokens", num_tokens))
        self._healed_requests.labels(self._model_name).inc(self._new_heals("requests", num_requests))
        for reason, count in dropped.items():
            self._heals_dropped.labels(reason, self._model_name).inc(self._new_heals(f"dropped: {reason}", count))

    def _new_heals(self, what: str, count: int) -> int:
        last, self._last_heals[what] = self._last_heals.get(what, 0), count
        return max(0, count - last)

    def set_stores(self, counts: Iterable[StoreCounts], num_stored: int) -> None:
        """Take over what stores have done so far, and how many donors lie in them alone."""
        for metric, labels, value in self._stores.changes(counts, num_stored):
            family = self._reuse[metric].labels(*labels, self._model_name)
            family.set(value) if metric.kind is MetricKind.GAUGE else family.inc(value)

    def set_risk(self, statements: Mapping[str, Mapping[str, RiskStatement]]) -> None:
        """Take over what may be said of each reuse class and part of its answers."""
        for metric in (RISK_AUDITS, RISK_CERTIFIED):
            self._reuse[metric].clear()
        for metric, labels, value in risk_samples(statements):
            self._reuse[metric].labels(*labels, self._model_name).set(value)

    def exposition(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return generate_latest(_WithoutCreated(self.registry))

    def samples(self, names: Iterable[str]) -> Iterator[Sample]:
        """Return the samples with these names alone, of which nothing else is collected or written."""
        for family in self.registry.restricted_registry(names).collect():
            yield from family.samples

    def _made(self, metric: ReuseMetric) -> Any:  # noqa: ANN401 - a counter, a gauge or a histogram
        if metric.kind is MetricKind.HISTOGRAM:
            return self._histogram(metric.name, metric.help, metric.buckets)
        make = self._counter if metric.kind is MetricKind.COUNTER else self._gauge
        return make(metric.name, metric.help, *metric.labels)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return self._ready(Counter(f"kvgraft:{name}", text, (*labels, "model_name"), registry=self.registry), labels)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return self._ready(Gauge(f"kvgraft:{name}", text, (*labels, "model_name"), registry=self.registry), labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = LATENCY_S) -> Histogram:
        metric = Histogram(f"kvgraft:{name}", text, ("model_name",), registry=self.registry, buckets=buckets)
        return self._ready(metric, ())

    def _ready(self, metric: M, labels: tuple[str, ...]) -> M:
        """Show a metric without labels of its own as 0 from the start."""
        if not labels:
            metric.labels(self._model_name)
        return metric


class _WithoutCreated(Collector):
    """A registry without the `_created` series that the client library adds to each counter."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family
