"""`kvgraft:*` metrics on SGLang's own Prometheus endpoint.

SGLang's scheduler is another process than its HTTP server. With `--enable-metrics` it sets `prometheus_client`'s
multi-process mode up before schedulers start, and whatever a scheduler counts then appears at the server's `/metrics`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from prometheus_client import Counter, Gauge, Histogram

from kvgraft.reuse.metrics import (
    DONOR_HOST_BYTES,
    DONOR_HOST_LIMIT_BYTES,
    DONOR_TOKENS,
    DONORS,
    GRAFT_ERRORS,
    GRAFT_REFUSED,
    METRICS,
    STORE_COLD_DONORS,
    MetricKind,
    StoreSamples,
    samples,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvgraft.reuse.metrics import Metric
    from kvgraft.types import GraftReport, StoreCounts

_LIVE = "kvgraft:live"
_OF_ALL_SCHEDULERS = {DONORS, DONOR_TOKENS, STORE_COLD_DONORS}
"""Gauges that add up over the schedulers of a server (data parallelism). Of the others the highest is shown: bytes are those
of the fullest worker, and what holds of one scheduler is to be known."""


class SGLangMetrics:
    """The metrics of all engines, of one scheduler; made once per process.

    Args:
        model_name: Value of the label.
        host_limit_bytes: What donors may take in this process.
        is_refused: This server or model is refused, and SGLang's own cache serves.
    """

    def __init__(self, model_name: str, host_limit_bytes: int = 0, *, is_refused: bool = False) -> None:
        self._model_name = model_name
        self._stores = StoreSamples()
        self._metrics = {metric: _made(metric) for metric in METRICS}
        live = Gauge(_LIVE, "1 while the backend serves in the scheduler", ("model_name",), multiprocess_mode="livemax")
        live.labels(model_name).set(not is_refused)
        for metric, family in self._metrics.items():
            if not metric.labels:
                family.labels(model_name)  # shown as 0 from the start, as on the other engines
        self._metrics[DONOR_HOST_LIMIT_BYTES].labels(model_name).set(host_limit_bytes)
        self._metrics[GRAFT_REFUSED].labels(model_name).set(is_refused)

    def count_report(self, report: GraftReport) -> None:
        """Count a request that ended."""
        for metric, labels, value in samples(report):
            family = self._metrics[metric].labels(*labels, self._model_name)
            family.observe(value) if metric.kind is MetricKind.HISTOGRAM else family.inc(value)

    def count_error(self) -> None:
        """Count a failure that became a miss."""
        self._metrics[GRAFT_ERRORS].labels(self._model_name).inc()

    def show_donors(self, num_donors: int, num_tokens: int, host_bytes: int) -> None:
        """Take over how many donors there are."""
        for metric, value in ((DONORS, num_donors), (DONOR_TOKENS, num_tokens), (DONOR_HOST_BYTES, host_bytes)):
            self._metrics[metric].labels(self._model_name).set(value)

    def show_stores(self, counts: Iterable[StoreCounts], num_cold: int) -> None:
        """Take over what stores have done so far."""
        for metric, labels, value in self._stores.changes(counts, num_cold):
            family = self._metrics[metric].labels(*labels, self._model_name)
            family.set(value) if metric.kind is MetricKind.GAUGE else family.inc(value)


def _made(metric: Metric) -> Any:  # noqa: ANN401 - a counter, a gauge or a histogram
    labels = (*metric.labels, "model_name")
    if metric.kind is MetricKind.HISTOGRAM:
        return Histogram(metric.full_name, metric.help, labels, buckets=metric.buckets)
    if metric.kind is MetricKind.GAUGE:
        mode: Literal["livesum", "livemax"] = "livesum" if metric in _OF_ALL_SCHEDULERS else "livemax"
        return Gauge(metric.full_name, metric.help, labels, multiprocess_mode=mode)
    return Counter(metric.full_name, metric.help, labels)
