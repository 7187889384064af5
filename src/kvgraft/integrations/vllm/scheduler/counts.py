"""Counts of reuse until vLLM asks for them: plain numbers and lists of seconds, for they travel as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvgraft.reuse.metrics import DONOR_HOST_BYTES, DONOR_TOKENS, DONORS, GRAFT_ERRORS, MetricKind, Sample, samples

if TYPE_CHECKING:
    from kvgraft.types import GraftReport


class Counts:
    """What happened since it was last told. Keys are the metric's name and its labels, separated by slashes."""

    def __init__(self) -> None:
        self.num_errors = 0
        self._data: dict[str, Any] = {}
        self._told: dict[str, Any] = {}

    def request(self, report: GraftReport) -> None:
        """Count a request that ended."""
        for sample in samples(report):
            self._add(sample)

    def error(self) -> None:
        """Count a failure of reuse; the request is computed."""
        self.num_errors += 1
        self._add(Sample(GRAFT_ERRORS, (), 1))

    def take(self, *, donors: int, donor_tokens: int, host_bytes: int) -> dict[str, Any] | None:
        """Hand the counts over and begin anew; None if nothing happened and no gauge has moved."""
        gauges = {DONORS.name: donors, DONOR_TOKENS.name: donor_tokens, DONOR_HOST_BYTES.name: host_bytes}
        if not self._data and gauges == self._told:
            return None
        data, self._data, self._told = {**self._data, **gauges}, {}, gauges
        return data

    def _add(self, sample: Sample) -> None:
        key = "/".join([sample.metric.name, *sample.labels])
        value = [sample.value] if sample.metric.kind is MetricKind.HISTOGRAM else sample.value
        self._data[key] = self._data[key] + value if key in self._data else value
