"""`kvgraft:*` metrics on SGLang's own Prometheus endpoint.

SGLang's scheduler is another process than its HTTP server. With `--enable-metrics` it sets `prometheus_client`'s
multi-process mode up before schedulers start, and whatever a scheduler counts then appears at the server's `/metrics`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge, Histogram

from kvgraft.reuse.metrics import token_kinds, token_outcome

if TYPE_CHECKING:
    from kvgraft.types import GraftReport

_QUICK_S = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.5, 1)


class SGLangMetrics:
    """Counters of one scheduler; made once per process."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._tokens = Counter(
            "kvgraft:prompt_tokens", "Prompt tokens by how they came about", ("kind", "outcome", "model_name")
        )
        self._misses = Counter("kvgraft:graft_misses", "Requests without a graft, and why", ("reason", "model_name"))
        self._errors = Counter(
            "kvgraft:graft_errors",
            "Lookups, copies and registrations that failed and became misses",
            ("stage", "model_name"),
        )
        self._lookup = Histogram(
            "kvgraft:lookup_seconds", "Finding and planning reuse", ("model_name",), buckets=_QUICK_S
        )
        self._graft = Histogram("kvgraft:graft_seconds", "Copying and rotating K/V", ("model_name",), buckets=_QUICK_S)
        self._live = Gauge(
            "kvgraft:live", "1 while the backend serves in the scheduler", ("model_name",), multiprocess_mode="livemax"
        )
        self._live.labels(model_name).set(1)

    def count_report(self, report: GraftReport) -> None:
        """Count one attempt of a request."""
        outcome = token_outcome(report)
        for kind, count in token_kinds(report).items():
            self._tokens.labels(kind, outcome, self._model_name).inc(count)
        if report.miss is not None:
            self._misses.labels(report.miss.reason.value, self._model_name).inc()
        self._lookup.labels(self._model_name).observe(report.timings_ms["lookup"] / 1e3)
        if report.spans:
            self._graft.labels(self._model_name).observe(report.timings_ms["graft"] / 1e3)

    def count_error(self, stage: str) -> None:
        """Count a failure that became a miss."""
        self._errors.labels(stage, self._model_name).inc()
