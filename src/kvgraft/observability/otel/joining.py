"""Join an exchange with the records of its choices, in any order of arrival."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvgraft.observability.recorder import RequestRecord

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvgraft.observability.otel.exchange import Exchange

logger = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""How long an exchange that has ended waits for records: those of choices that the engine did not take never come."""
_MOST_RECORDS = 1 << 14


class Joining:
    """Halves that wait for their other half. Not thread-safe."""

    def __init__(self) -> None:
        self._exchanges: list[Exchange] = []
        self._records: dict[str, RequestRecord] = {}
        self._has_dropped = False

    def add(self, item: Exchange | RequestRecord) -> None:
        """Take in one half. Records whose exchange does not end are bounded; the oldest goes, with one warning."""
        if not isinstance(item, RequestRecord):
            self._exchanges.append(item)
            return
        self._records[item.request_id] = item
        if len(self._records) > _MOST_RECORDS:
            del self._records[next(iter(self._records))]
            if not self._has_dropped:
                logger.warning("more than %d choices wait for their answer's end; spans lack the oldest", _MOST_RECORDS)
            self._has_dropped = True

    def joined(self, now: float) -> Iterator[tuple[Exchange, list[RequestRecord]]]:
        """Yield exchanges that have all their records or have waited for long, in order, with the records in choice order.

        Args:
            now: `time.perf_counter()`; `math.inf` has waited for long.
        """
        waiting = []
        for exchange in self._exchanges:
            names = () if exchange.asked is None else [name for name, _ in exchange.asked.choices]
            if all(name in self._records for name in names) or now >= exchange.ended + PATIENCE_S:
                yield exchange, [self._records.pop(name) for name in names if name in self._records]
            else:
                waiting.append(exchange)
        self._exchanges = waiting
