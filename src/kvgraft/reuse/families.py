"""The metrics of reuse in a metrics library that an engine passes: `prometheus_client`, or Ray's in its place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvgraft.reuse.metrics import METRICS, MetricKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvgraft.reuse.metrics import Metric, Sample


class MetricFamilies:
    """Every metric of reuse, with the labels that an engine gives all of its own before the metric's."""

    def __init__(
        self,
        counter: Callable[..., Any],
        gauge: Callable[..., Any],
        histogram: Callable[..., Any],
        labelnames: Sequence[str],
        *,
        gauge_mode: Callable[[Metric], str],
    ) -> None:
        """Make the metrics.

        Args:
            counter: Class of counters, as `prometheus_client` has it; `gauge` and `histogram` likewise.
            gauge: Class of gauges.
            histogram: Class of histograms.
            labelnames: Labels of the engine.
            gauge_mode: The `multiprocess_mode` of a gauge.
        """
        self.by_name: dict[str, Any] = {}
        for metric in METRICS:
            options = {
                "name": metric.full_name,
                "documentation": metric.help,
                "labelnames": [*labelnames, *metric.labels],
            }
            match metric.kind:
                case MetricKind.COUNTER:
                    made = counter(**options)
                case MetricKind.GAUGE:
                    made = gauge(**options, multiprocess_mode=gauge_mode(metric))
                case MetricKind.HISTOGRAM:
                    made = histogram(**options, buckets=metric.buckets)
            self.by_name[metric.name] = made

    def begin(self, labels: Sequence[object]) -> None:
        """Show metrics without labels of their own from the start.

        Of a counter that appears with its first count, `rate` and `increase` never see that count.
        """
        for metric in METRICS:
            if not metric.labels:
                self.by_name[metric.name].labels(*labels)

    def record(self, samples: Iterable[Sample], labels: Sequence[object]) -> None:
        """Add to counters, set gauges and observe in histograms, under the engine's `labels`."""
        for metric, own, value in samples:
            family = self.by_name[metric.name].labels(*labels, *own)
            match metric.kind:
                case MetricKind.COUNTER:
                    family.inc(value)
                case MetricKind.GAUGE:
                    family.set(value)
                case MetricKind.HISTOGRAM:
                    family.observe(value)
