"""What stores have done, as metrics take it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.reuse.metrics import (
    STORE_COLD_DONORS,
    STORE_READ_BYTES,
    STORE_READS,
    STORE_RESTING,
    STORE_WRITES,
    STORE_WRITTEN_BYTES,
    MetricKind,
    Sample,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvgraft.reuse.metrics import Metric
    from kvgraft.types import StoreCounts


class StoreSamples:
    """Turns what stores have done in all into what metrics take. Not thread-safe."""

    def __init__(self) -> None:
        self._reported: dict[tuple[Metric, tuple[str, ...]], float] = {}

    def changes(self, counts: Iterable[StoreCounts], num_stored: int) -> Iterator[Sample]:
        """Yield what counters have gained since the last call, and the values of gauges. Stores of one name are one."""
        for sample in _store_totals(counts, num_stored):
            if sample.metric.kind is MetricKind.GAUGE:
                yield sample
                continue
            reported = self._reported.get(sample[:2], 0)
            self._reported[sample[:2]] = sample.value
            yield sample._replace(value=max(0, sample.value - reported))


def _store_totals(counts: Iterable[StoreCounts], num_stored: int) -> Iterator[Sample]:
    yield Sample(STORE_COLD_DONORS, (), num_stored)
    totals: dict[tuple[Metric, tuple[str, ...]], float] = {}
    for store in counts:
        entries: list[tuple[Metric, tuple[str, ...], float]] = [
            (STORE_READ_BYTES, (store.name,), store.read_bytes),
            (STORE_WRITTEN_BYTES, (store.name,), store.written_bytes),
            (STORE_RESTING, (store.name,), store.is_resting),
            *((STORE_READS, (store.name, outcome), count) for outcome, count in store.reads.items()),
            *((STORE_WRITES, (store.name, outcome), count) for outcome, count in store.writes.items()),
            (STORE_READS, (store.name, "look_failed"), store.failed_looks),
        ]
        for metric, labels, value in entries:
            totals[metric, labels] = totals.get((metric, labels), 0) + value
    yield from (Sample(metric, labels, value) for (metric, labels), value in totals.items())
