"""Counts of reuse on the Prometheus endpoint of vLLM's server, whose process alone loads this."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from kvgraft.reuse.families import MetricFamilies
from kvgraft.reuse.metrics import METRICS, Sample

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_METRICS = {metric.name: metric for metric in METRICS}


class GraftPromMetrics(KVConnectorPromMetrics):
    """`kvgraft:*` metrics of the vLLM server, as `kvgraft.reuse.metrics` names them."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        kinds = (self._counter_cls, self._gauge_cls, self._histogram_cls)
        # As vLLM's own gauges: of several API servers the newest value is right, and no label `pid` appears.
        self._families = MetricFamilies(*kinds, labelnames, gauge_mode=lambda _: "mostrecent")
        for labels in per_engine_labelvalues.values():
            self._families.begin(labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record what `GraftStats.data` held."""
        for key, value in transfer_stats_data.items():
            name, *labels = key.split("/")
            values = value if isinstance(value, list) else [value]
            samples = (Sample(_METRICS[name], tuple(labels), each) for each in values)
            self._families.record(samples, self.per_engine_labelvalues[engine_idx])
