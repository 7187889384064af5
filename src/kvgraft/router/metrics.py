"""Metrics of the router for Prometheus, `kvgraft_router:*`. Labels name workers, never tenants or requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import Metric

    from kvgraft.router.core import Router, WorkerChoice

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class RouterMetrics:
    """Counts, in a registry of its own."""

    def __init__(self, router: Router) -> None:
        self._registry = CollectorRegistry()
        self._router = router
        self._requests = self._counter("requests", "Requests by worker and outcome", "worker", "outcome")
        self._tokens = self._counter(
            "prompt_tokens", "Prompt tokens by what the worker was expected to hold", "worker", "kind"
        )
        self._retries = self._counter("retries", "Requests that were sent to a second worker", "worker")
        self._unread = self._counter(
            "unread_prompts", "Requests that were sent without a look at their tokens", "reason"
        )
        self._mismatches = self._counter(
            "render_mismatches", "Kinds of prompts that a worker was found to render otherwise", "worker", "kind"
        )
        self._refused = self._counter("refused_requests", "Requests that no worker got", "reason")
        self._score_time = self._histogram("score_seconds", "Tokenising a prompt and scoring all workers")
        self._ttfb = self._histogram(
            "time_to_first_byte_seconds", "From arrival to the first byte of a worker's answer"
        )
        self._registry.register(_RouterState(router))

    def chosen(self, choice: WorkerChoice) -> None:
        """Count what the chosen worker holds of a prompt."""
        name = choice.worker.spec.name
        self._tokens.labels(name, "computed").inc(max(0.0, choice.prefill_tokens))
        if choice.score is not None:
            self._tokens.labels(name, "exact").inc(choice.score.exact_tokens)
            self._tokens.labels(name, "continued").inc(choice.score.continued_tokens)
            self._tokens.labels(name, "shifted").inc(choice.score.shifted_tokens)

    def ended(self, worker: str, outcome: str) -> None:
        """Count the end of a request at a worker."""
        self._requests.labels(worker, outcome).inc()

    def retried(self, worker: str) -> None:
        """Count a request that a worker has failed before its first byte."""
        self._retries.labels(worker).inc()

    def unread(self, reason: str) -> None:
        """Count a request with tokens that are not known here."""
        self._unread.labels(reason).inc()

    def renders_otherwise(self, worker: str, kind: str) -> None:
        """Count a kind of prompts that a worker renders otherwise than the router."""
        self._mismatches.labels(worker, kind).inc()

    def refused(self, reason: str) -> None:
        """Count a request that no worker got."""
        self._refused.labels(reason).inc()

    def scored(self, seconds: float) -> None:
        """Note what looking at a prompt took."""
        self._score_time.observe(seconds)

    def first_byte(self, seconds: float) -> None:
        """Note how long a client waited."""
        self._ttfb.observe(seconds)

    def exposition(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"kvgraft_router:{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"kvgraft_router:{name}", text, registry=self._registry, buckets=_SECONDS)


class _RouterState(Collector):
    """State of the router at the moment of asking."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def collect(self) -> Iterator[Metric]:
        """Yield load, speed and known text of each worker, and how its event stream went."""
        up, flight, speed = (
            GaugeMetricFamily(f"kvgraft_router:{name}", text, labels=["worker"])
            for name, text in (
                ("worker_up", "1 if the worker answers"),
                ("in_flight_requests", "Requests at the worker"),
                ("prefill_seconds_per_token", "Measured speed of prefills"),
            )
        )
        for name, load in self._router.loads.items():
            up.add_metric([name], float(load.is_up))
            flight.add_metric([name], load.num_in_flight)
            if load.seconds_per_token is not None:
                speed.add_metric([name], load.seconds_per_token)
        text = GaugeMetricFamily("kvgraft_router:known_tokens", "Text known of the worker", labels=["worker", "kind"])
        for name, size in self._router.sizes().items():
            text.add_metric([name, "exact"], size.exact_tokens)
            text.add_metric([name, "shifted"], size.shifted_tokens)
        yield from (up, flight, speed, text, self._gaps())

    def _gaps(self) -> Metric:
        gaps = CounterMetricFamily(
            "kvgraft_router:event_gaps", "Breaks of the event stream", labels=["worker", "outcome"]
        )
        for name, sequence in self._router.sequences().items():
            gaps.add_metric([name, "filled"], sequence.num_filled)
            gaps.add_metric([name, "lost"], sequence.num_lost)
            gaps.add_metric([name, "restarted"], sequence.num_restarts)
        return gaps
