"""Figures of one run of the load test, and whether the server sustained its rate."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.bench.arrivals import Load

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvgraft.bench.client import TimedRequest
    from kvgraft.bench.load import LoadResult

KEPT_UP = 0.95
"""Share of the offered rate that must be completed."""

_PERCENTILES = (50, 90, 95, 99)
_FEWEST_FOR_GROWTH = 8


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One side under one load. Times are milliseconds: `mean`, `p50`, `p90`, `p95`, `p99`, or nothing where there are none.

    Attributes:
        mode: Name of the side: a reuse mode, or a server.
        rate: Offered requests per second; 0 where clients wait for their answers.
        failures: Failed requests by kind, those of the warm-up too.
        unfinished: Requests that were still running when the run was ended.
        gave_up: Why the run was ended early, or None.
        arrival_s: From the first arrival to the last planned one.
        seconds: From the first arrival until the last request ended.
        tokens_per_s: Output tokens of completed requests over `seconds`.
        reused_share: Share of the prompt tokens of completed requests that was not computed.
        kept_up: Rate at which requests complete over the rate at which they arrive, estimated from the growth of delays.
        ttft_ms: From the scheduled arrival to the first token. Unfinished requests count with their wait so far.
        end_to_end_ms: From the scheduled arrival to the end.
        client_lag_ms: Delay of the client in sending requests.
        clients: Clients with one request at a time; 0 where requests come at a rate.
        gap_ms: Between two tokens of an answer, over all gaps of all answers.
    """

    mode: str
    rate: float
    planned: int
    sent: int
    completed: int
    failures: dict[str, int]
    unfinished: int
    gave_up: str | None
    arrival_s: float
    seconds: float
    requests_per_s: float
    tokens_per_s: float
    prompt_tokens: int
    reused_share: float
    kept_up: float
    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]
    end_to_end_ms: dict[str, float]
    client_lag_ms: dict[str, float]
    clients: int = 0
    gap_ms: dict[str, float] = field(default_factory=dict)

    @property
    def load(self) -> Load:
        """How its requests came."""
        return Load(self.rate, self.clients)

    @property
    def complete(self) -> bool:
        """Whether every request was sent and ended well."""
        return self.gave_up is None and self.completed == self.planned and not self.failures

    @property
    def stable(self) -> bool:
        """Whether the run is complete and the queue did not grow."""
        return self.complete and self.kept_up >= KEPT_UP

    def sustains(self, slo_ttft_ms: float) -> bool:
        """Return whether the run is complete, 95 % of its requests had their first token in time, and the queue did not grow.

        Over a run that is 20 times as long as the limit, a queue that grew by more than 5 % would have broken the limit;
        in shorter ones the estimate `kept_up` decides.
        """
        in_time = self.ttft_ms.get("p95", float("inf")) <= slo_ttft_ms
        is_long = self.arrival_s * 1e3 * (1 - KEPT_UP) >= slo_ttft_ms
        return self.complete and in_time and (is_long or self.kept_up >= KEPT_UP)


def summarise(
    mode: str, load: Load, result: LoadResult, arrival_s: float, warm_up: Sequence[TimedRequest] = ()
) -> RunSummary:
    """Compute the figures of a run; of `warm_up` only failures count."""
    done = [exchange for exchange in result.exchanges if exchange.succeeded]
    prompt_tokens = sum(exchange.prompt_tokens for exchange in done)
    failures = Counter(exchange.failure for exchange in result.exchanges if exchange.ended_s and exchange.failure)
    failures.update(f"{exchange.failure} in warm-up" for exchange in warm_up if exchange.failure)
    return RunSummary(
        mode=mode,
        rate=load.rate,
        planned=result.planned,
        sent=len(result.exchanges),
        completed=len(done),
        failures={kind: count for kind, count in failures.items() if kind is not None},
        unfinished=sum(exchange.ended_s is None for exchange in result.exchanges),
        gave_up=result.gave_up,
        arrival_s=arrival_s,
        seconds=result.seconds,
        requests_per_s=len(done) / result.seconds,
        tokens_per_s=sum(exchange.completion_tokens for exchange in done) / result.seconds,
        prompt_tokens=prompt_tokens,
        reused_share=sum(exchange.reused_tokens or 0 for exchange in done) / max(prompt_tokens, 1),
        kept_up=1.0 if load.clients else _kept_up(done),
        ttft_ms=_times(_first_token_seconds(result)),
        tpot_ms=_times(exchange.tpot_s for exchange in done),
        end_to_end_ms=_times(exchange.end_to_end_s for exchange in done),
        client_lag_ms=_times(e.sent_s - e.scheduled_s for e in result.exchanges if e.sent_s is not None),
        clients=load.clients,
        gap_ms=_times(after - before for exchange in done for before, after in pairwise(exchange.token_s)),
    )


def percentiles(values: Iterable[float]) -> dict[str, float]:
    """Return mean and percentiles (linear between neighbours), or nothing for no values."""
    array = np.fromiter(values, np.float64)
    if not len(array):
        return {}
    figures = dict(zip((f"p{p}" for p in _PERCENTILES), np.percentile(array, _PERCENTILES), strict=True))
    return {"mean": float(array.mean())} | {name: float(value) for name, value in figures.items()}


def kept_up(times: Sequence[tuple[float, float]]) -> float:
    """Estimate completed over offered rate from pairs of arrival and end-to-end seconds.

    The k-th completion follows the k-th arrival after a delay. If it grows by g seconds per second of arrivals, requests
    that arrive within a second complete within 1 + g seconds. g is the mean delay of the last tenth less that of the first
    half, over their distance. Unlike completions in a window, this is not lowered by requests that are rightly still running
    when the window ends. Its error is about the spread of delays over the length of the run.
    """
    if len(times) < _FEWEST_FOR_GROWTH:
        return 1.0
    arrivals = np.sort([arrival for arrival, _ in times])
    delays = np.sort([arrival + seconds for arrival, seconds in times]) - arrivals
    early, late = slice(None, len(times) // 2), slice(-max(1, len(times) // 10), None)
    distance = arrivals[late].mean() - arrivals[early].mean()
    growth = (delays[late].mean() - delays[early].mean()) / distance if distance > 0 else 0.0
    return float(1 / (1 + max(growth, 0.0)))


def _kept_up(done: Sequence[TimedRequest]) -> float:
    return kept_up([(exchange.scheduled_s, exchange.end_to_end_s) for exchange in done if exchange.end_to_end_s])


def _first_token_seconds(result: LoadResult) -> list[float]:
    """Time to first token of every request that got one, and the wait of those that were cut off waiting."""
    known = [exchange.ttft_s for exchange in result.exchanges if exchange.ttft_s is not None]
    if not result.exchanges:
        return known
    end = result.exchanges[0].scheduled_s + result.seconds
    waiting = (e for e in result.exchanges if e.ended_s is None and not e.token_s)
    return known + [end - exchange.scheduled_s for exchange in waiting]


def _times(seconds: Iterable[float | None]) -> dict[str, float]:
    return percentiles(1e3 * value for value in seconds if value is not None)
