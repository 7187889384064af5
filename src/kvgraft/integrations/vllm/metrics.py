"""Counts of reuse, through vLLM's connector statistics to its log; `prometheus` has them on its endpoint."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvgraft.reuse.metrics import (
    DONOR_HOST_BYTES,
    DONORS,
    GRAFT_ERRORS,
    GRAFTED_REQUESTS,
    METRICS,
    PROMPT_TOKENS,
    MetricKind,
)

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


def _is_gauge(key: str) -> bool:
    return _METRICS[key.partition("/")[0]].kind is MetricKind.GAUGE
