"""The metrics of reuse as vLLM's endpoint has them. Knows the metrics library's three kinds by what vLLM passes, not vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvgraft.reuse.metrics import METRICS, MetricKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvgraft.reuse.metrics import Metric


def made_families(
    counter: Callable[..., Any],
    gauge: Callable[..., Any],
    histogram: Callable[..., Any],
    labelnames: Sequence[str],
    engines: Iterable[Sequence[object]],
) -> dict[str, Any]:
    """Make every metric of reuse.

    Args:
        counter: Makes a counter; like `gauge` and `histogram` a class of `prometheus_client`, or Ray's in its place.
        gauge: Makes a gauge.
        histogram: Makes a histogram.
        labelnames: Labels that vLLM gives all of its metrics.
        engines: Their values, per engine of the server.

    Returns:
        dict: By the metric's name without prefix. Those without labels of their own are there from the start, as on the
        other engines: of a counter that appears with its first count, `rate` and `increase` never see that count.
    """
    made = {metric.name: _made(metric, counter, gauge, histogram, labelnames) for metric in METRICS}
    for values in engines:
        for metric in METRICS:
            if not metric.labels:
                made[metric.name].labels(*values)
    return made


def _made(
    metric: Metric,
    counter: Callable[..., Any],
    gauge: Callable[..., Any],
    histogram: Callable[..., Any],
    labelnames: Sequence[str],
) -> Any:  # noqa: ANN401 - what the metrics library makes
    told = {"name": metric.full_name, "documentation": metric.help, "labelnames": [*labelnames, *metric.labels]}
    match metric.kind:
        case MetricKind.COUNTER:
            return counter(**told)
        case MetricKind.GAUGE:
            # As vLLM's own: of several API servers the one that was told last is right, and no label `pid` appears.
            return gauge(**told, multiprocess_mode="mostrecent")
        case MetricKind.HISTOGRAM:
            return histogram(**told, buckets=metric.buckets)
