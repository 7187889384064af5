"""The highest rate that a mode sustains: out of measured runs, or by looking for it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvgraft.bench.summary import RunSummary


@dataclass(frozen=True, slots=True)
class SustainedRate:
    """Rate that a mode sustains under a limit of time to first token.

    Attributes:
        mode: Reuse mode.
        rate: Highest measured rate, in requests per second, that was sustained; 0 if none was.
        p95_ttft_ms: At that rate, or None.
        at_least: No higher rate was measured that was not sustained, so the mode may sustain more.
        irregular: A lower rate was not sustained: the machine's speed varied, or the runs are too short.
        ratio: `rate` over that of `off`, or None where there is none.
    """

    mode: str
    rate: float
    p95_ttft_ms: float | None
    at_least: bool
    irregular: bool
    ratio: float | None


def default_slo_ms(runs: Iterable[RunSummary]) -> float | None:
    """Return the p95 time to first token that `off` shows at the highest rate at which it is stable, if any."""
    stable = [run for run in runs if run.mode == "off" and run.stable]
    return max(stable, key=lambda run: run.rate).ttft_ms["p95"] if stable else None


def sustained_rates(runs: Sequence[RunSummary], slo_ttft_ms: float) -> list[SustainedRate]:
    """Find every mode's highest sustained rate, modes in order of their first run."""
    base = max((run.rate for run in runs if run.mode == "off" and run.sustains(slo_ttft_ms)), default=0.0)
    return [_sustained(mode, runs, slo_ttft_ms, base) for mode in dict.fromkeys(run.mode for run in runs)]


def _sustained(mode: str, runs: Sequence[RunSummary], slo_ttft_ms: float, base: float) -> SustainedRate:
    own = [run for run in runs if run.mode == mode]
    good = [run for run in own if run.sustains(slo_ttft_ms)]
    failed = [run.rate for run in own if not run.sustains(slo_ttft_ms)]
    best = max(good, key=lambda run: run.rate, default=None)
    rate = best.rate if best else 0.0
    return SustainedRate(
        mode=mode,
        rate=rate,
        p95_ttft_ms=best.ttft_ms["p95"] if best else None,
        at_least=all(other < rate for other in failed),
        irregular=any(other < rate for other in failed),
        ratio=rate / base if base else None,
    )


class RateSearch:
    """Looks for the highest sustained rate: doubles (or halves) until it is enclosed, then bisects on a logarithmic scale.

    Args:
        first: Rate to begin with.
        max_runs: Runs after which the search ends, enclosed or not.
        precision: Ratio of the enclosing rates at which it is narrow enough.
    """

    def __init__(self, first: float, max_runs: int, precision: float = 1.1) -> None:
        self._next = first
        self._runs_left = max_runs
        self._precision = precision
        self._low = 0.0
        self._high = math.inf

    @property
    def next_rate(self) -> float | None:
        """Rate to measure next, or None when the search has ended."""
        is_narrow = self._low > 0 and self._high / self._low <= self._precision
        return None if self._runs_left == 0 or is_narrow else self._next

    def record(self, *, sustained: bool) -> None:
        """Take the outcome at `next_rate`."""
        self._runs_left -= 1
        if sustained:
            self._low = self._next
        else:
            self._high = self._next
        if self._high == math.inf:
            self._next = 2 * self._low
        elif self._low == 0:
            self._next = self._high / 2
        else:
            self._next = math.sqrt(self._low * self._high)
