"""Counts of reuse until vLLM asks for them: plain numbers and lists of seconds, as JSON takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvgraft.reuse.failures import Soundness
from kvgraft.reuse.metrics import (
    DONOR_HOST_LIMIT_BYTES,
    GRAFT_ERRORS,
    GRAFT_REFUSED,
    METRICS,
    STORE_COLD_DONORS,
    MetricKind,
    Sample,
    donor_samples,
    num_failed,
    samples,
    semantic_samples,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvgraft.types import GraftReport


_KINDS = {metric.name: metric.kind for metric in METRICS}


class Counts:
    """Counts since they were last taken. Keys are the metric's name and its labels, separated by slashes.

    Attributes:
        books: What is known of requests, donors and blocks; doubtful after a failure that may have left it half changed.
    """

    def __init__(self) -> None:
        self.books = Soundness()
        self.num_errors = 0
        self._data: dict[str, Any] = {}
        self._taken: dict[str, Any] = {}
        self._num_ranks: dict[str, float] = {}

    def request(self, report: GraftReport) -> None:
        """Count a request that ended."""
        for sample in samples(report):
            self._add(sample)

    def stores(self, counts: Mapping[str, float]) -> None:
        """Take counts of stores by the keys of metrics; of a gauge, the change of the number of ranks on which it is 1."""
        for key, value in counts.items():
            kind = _KINDS.get(key.partition("/")[0])
            if kind is not None:
                kept = self._num_ranks if kind is MetricKind.GAUGE else self._data
                kept[key] = kept.get(key, 0) + value

    def error(self) -> None:
        """Count a failure of reuse; the request is computed."""
        self.num_errors += 1
        self._add(Sample(GRAFT_ERRORS, (), 1))

    def failed(self, error: Exception) -> None:
        """Count an exception that was caught, and have verified what it may have left half changed."""
        self.books.doubt(error)
        self.error()

    def semantic(self, outcomes: Mapping[str, int]) -> None:
        """Count calls of a semantic provider by outcome; failed ones are failures of reuse."""
        for sample in semantic_samples(outcomes):
            self._add(sample)
        for _ in range(num_failed(outcomes)):
            self.error()

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
        gauges = {metric.name: value for metric, _, value in donor_samples(donors, donor_tokens, host_bytes)}
        gauges |= {DONOR_HOST_LIMIT_BYTES.name: host_limit_bytes, GRAFT_REFUSED.name: int(is_refused)}
        gauges |= {STORE_COLD_DONORS.name: cold_donors} if cold_donors or STORE_COLD_DONORS.name in self._taken else {}
        gauges |= {key: int(count > 0) for key, count in self._num_ranks.items()}
        if not self._data and gauges == self._taken:
            return None
        data, self._data, self._taken = {**self._data, **gauges}, {}, gauges
        return data

    def _add(self, sample: Sample) -> None:
        key = "/".join([sample.metric.name, *sample.labels])
        value = [sample.value] if sample.metric.kind is MetricKind.HISTOGRAM else sample.value
        self._data[key] = self._data[key] + value if key in self._data else value
