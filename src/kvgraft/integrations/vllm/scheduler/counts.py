"""Counts of reuse until vLLM asks for them: plain numbers and lists of seconds, for they travel as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
    Sample,
    samples,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvgraft.types import GraftReport


_KINDS = {metric.name: metric.kind for metric in METRICS}


class Counts:
    """What happened since it was last told. Keys are the metric's name and its labels, separated by slashes."""

    def __init__(self) -> None:
        self.num_errors = 0
        self._data: dict[str, Any] = {}
        self._told: dict[str, Any] = {}
        self._num_ranks: dict[str, float] = {}

    def request(self, report: GraftReport) -> None:
        """Count a request that ended."""
        for sample in samples(report):
            self._add(sample)

    def stores(self, counts: Mapping[str, float]) -> None:
        """Take what happened in stores, by the keys of metrics; of a gauge on how many ranks more, or less, it is 1 now."""
        for key, value in counts.items():
            kind = _KINDS.get(key.partition("/")[0])
            if kind is not None:
                kept = self._num_ranks if kind is MetricKind.GAUGE else self._data
                kept[key] = kept.get(key, 0) + value

    def error(self) -> None:
        """Count a failure of reuse; the request is computed."""
        self.num_errors += 1
        self._add(Sample(GRAFT_ERRORS, (), 1))

    def take(
        self,
        *,
        donors: int,
        donor_tokens: int,
        host_bytes: int,
        host_limit_bytes: int,
        is_refused: bool,
        cold_donors: int = 0,
    ) -> dict[str, Any] | None:
        """Hand the counts over and begin anew; None if nothing happened and no gauge has moved."""
        gauges = {
            DONORS.name: donors,
            DONOR_TOKENS.name: donor_tokens,
            DONOR_HOST_BYTES.name: host_bytes,
            DONOR_HOST_LIMIT_BYTES.name: host_limit_bytes,
            GRAFT_REFUSED.name: int(is_refused),
        }
        gauges |= {STORE_COLD_DONORS.name: cold_donors} if cold_donors or STORE_COLD_DONORS.name in self._told else {}
        gauges |= {key: int(count > 0) for key, count in self._num_ranks.items()}
        if not self._data and gauges == self._told:
            return None
        data, self._data, self._told = {**self._data, **gauges}, {}, gauges
        return data

    def _add(self, sample: Sample) -> None:
        key = "/".join([sample.metric.name, *sample.labels])
        value = [sample.value] if sample.metric.kind is MetricKind.HISTOGRAM else sample.value
        self._data[key] = self._data[key] + value if key in self._data else value
