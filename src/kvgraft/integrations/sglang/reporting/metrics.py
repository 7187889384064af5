"""`kvgraft:*` metrics on SGLang's own Prometheus endpoint.

SGLang's scheduler is another process than its HTTP server. With `--enable-metrics` it sets `prometheus_client`'s
multi-process mode up before schedulers start, and everything that a scheduler counts then appears at the server's `/metrics`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge, Histogram

from kvgraft.reuse.families import MetricFamilies
from kvgraft.reuse.metrics import (
    DONOR_HOST_LIMIT_BYTES,
    DONOR_TOKENS,
    DONORS,
    GRAFT_REFUSED,
    STORE_COLD_DONORS,
    Sample,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvgraft.reuse.metrics import Metric

_OF_ALL_SCHEDULERS = {DONORS, DONOR_TOKENS, STORE_COLD_DONORS}
"""Gauges that add up over the schedulers of a server (data parallelism). Of the others the highest is shown: bytes are those
of the fullest worker, and what holds of one scheduler is to be known."""


class SGLangMetrics:
    """The metrics of one scheduler; made once per process.

    Args:
        model_name: Value of the label.
        host_limit_bytes: What donors may take in this process.
        is_refused: This server or model is refused, and SGLang's own cache serves.
    """

    def __init__(self, model_name: str, host_limit_bytes: int = 0, *, is_refused: bool = False) -> None:
        self._labels = (model_name,)
        self._families = MetricFamilies(Counter, Gauge, Histogram, ["model_name"], gauge_mode=_gauge_mode)
        self._families.begin(self._labels)
        help_text = "1 while the backend serves in the scheduler"
        live = Gauge("kvgraft:live", help_text, ("model_name",), multiprocess_mode="livemax")
        live.labels(model_name).set(not is_refused)
        self.record([Sample(DONOR_HOST_LIMIT_BYTES, (), host_limit_bytes), Sample(GRAFT_REFUSED, (), is_refused)])

    def record(self, samples: Iterable[Sample]) -> None:
        """Record samples."""
        self._families.record(samples, self._labels)


def _gauge_mode(metric: Metric) -> str:
    return "livesum" if metric in _OF_ALL_SCHEDULERS else "livemax"
