"""Counts of reuse, through vLLM's connector statistics to its log and its Prometheus endpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvgraft.reuse.families import MetricFamilies
from kvgraft.reuse.metrics import (
    DONOR_HOST_BYTES,
    DONORS,
    GRAFT_ERRORS,
    GRAFTED_REQUESTS,
    METRICS,
    PROMPT_TOKENS,
    MetricKind,
    Sample,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_METRICS = {metric.name: metric for metric in METRICS}


class GraftStats(KVConnectorStats):
    """Counts of `Counts.take`, as vLLM carries them."""

    data: dict[str, Any]

    def reset(self) -> None:
        """Begin anew; gauges stay as they are."""
        self.data = {key: value for key, value in self.data.items() if _is_gauge(key)}

    def is_empty(self) -> bool:
        """Whether there are no counts."""
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> GraftStats:
        """Add another object's counts to this one; gauges take the newer value."""
        for key, value in other.data.items():
            self.data[key] = value if _is_gauge(key) or key not in self.data else self.data[key] + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the figures of one line of the log."""
        tokens = {
            kind: self._sum(f"{PROMPT_TOKENS.name}/{kind}/")
            for kind in ("prefix", "segment", "substituted", "recomputed")
        }
        prompt = self._sum(f"{PROMPT_TOKENS.name}/")
        return {
            "kvgraft prompt tokens": prompt,
            "reused %": round(100 * (sum(tokens.values()) - tokens["recomputed"]) / max(1, prompt), 1),
            "grafted requests": self.data.get(GRAFTED_REQUESTS.name, 0),
            "grafted tokens": tokens["segment"],
            "substituted tokens": tokens["substituted"],
            "recomputed tokens": tokens["recomputed"],
            "errors": self.data.get(GRAFT_ERRORS.name, 0),
            "donors": self.data.get(DONORS.name, 0),
            "host MiB": round(self.data.get(DONOR_HOST_BYTES.name, 0) / 2**20, 1),
        }

    def _sum(self, prefix: str) -> int:
        return sum(value for key, value in self.data.items() if key.startswith(prefix))


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


def _is_gauge(key: str) -> bool:
    return _METRICS[key.partition("/")[0]].kind is MetricKind.GAUGE
