"""Figures over requests and how certain they are: percentile bootstraps over requests, seeded."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from kvgraft.bench.fidelity.rows import resamples

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    Values = NDArray[np.float64]
    Columns = dict[str, float | None]

_INTERVAL = (2.5, 97.5)


def mean(values: Sequence[float]) -> float | None:
    """Their mean; None for none."""
    return float(np.mean(values)) if len(values) else None


def median(values: Sequence[float]) -> float | None:
    """Their median; None for none."""
    return float(np.median(values)) if len(values) else None


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The percentile; None for no values."""
    return float(np.percentile(values, percent)) if len(values) else None


def with_interval(name: str, statistic: Callable[..., float], columns: Sequence[Sequence[float]], seed: int) -> Columns:
    """Return a statistic of `columns` under `name`, and its 95 % interval under `name_low` and `name_high`.

    Args:
        name: In the row.
        statistic: Takes an array per column.
        columns: Values per request, all of one length. One request has no interval, none has no statistic.
        seed: Of the resampling.
    """
    arrays = [np.asarray(column, np.float64) for column in columns]
    count = len(arrays[0])
    low = high = None
    if count > 1:
        drawn = [statistic(*(array[chosen] for array in arrays)) for chosen in _resamples(count, seed)]
        low, high = map(float, np.percentile(drawn, _INTERVAL))
    found = float(statistic(*arrays)) if count else None
    return {name: found, f"{name}_low": low, f"{name}_high": high}


@lru_cache(maxsize=16)
def _resamples(count: int, seed: int) -> list[NDArray[np.int64]]:
    """Draw resamples of `count` requests; every figure of the same requests is resampled alike, and they are drawn once."""
    return resamples(range(count), seed)


def off_and_on(off: Sequence[float], on: Sequence[float]) -> Columns:
    """Return medians and 95th percentiles of milliseconds with reuse off and on."""
    return {
        "off_ms": median(off),
        "off_p95_ms": percentile(off, 95),
        "on_ms": median(on),
        "on_p95_ms": percentile(on, 95),
    }


def task_scores(records: Sequence[Mapping[str, Any]], seed: int) -> Columns:
    """Return mean scores of answers with reuse off and on, and the mean of their differences with its interval.

    By the tasks' own measure (`score`) and by whether an answer holds a right one (`contains`).
    """
    found: Columns = {}
    for column, figure in (("score", "task"), ("contains", "contains")):
        off, on = ([record[side][figure] for record in records] for side in ("off", "on"))
        found |= {f"{column}_off": mean(off), f"{column}_on": mean(on)}
        changes = [after - before for before, after in zip(off, on, strict=True)]
        found |= with_interval(f"{column}_difference", array_mean, [changes], seed)
    return found


def fidelity_figures(measured: Sequence[Mapping[str, Any]], seed: int) -> Columns:
    """Return how far answers are from full prefill's, given the figures of each: means with intervals, and a median.

    A figure that an answer lacks (a server shows no distributions) is of the others alone.
    """
    kl, flips, equal = (
        [each[name] for each in measured if name in each] for name in ("mean_kl", "first_flip", "greedy_equal")
    )
    return {
        **with_interval("mean_kl", array_mean, [kl], seed),
        "median_kl": median(kl),
        **with_interval("first_flip_share", array_mean, [flips], seed),
        **with_interval("greedy_equal_share", array_mean, [equal], seed),
    }


def ratio_of_sums(first: Values, second: Values) -> float:
    """All of `first` over all of `second`: what a load of these requests would see."""
    return float(first.sum() / second.sum())


def ratio_of_perplexities(nll: Values, reference_nll: Values) -> float:
    """Geometric mean of the ratios of two perplexities, given negative log-likelihoods per token."""
    return float(np.exp((nll - reference_nll).mean()))


def array_mean(values: Values) -> float:
    """Mean, as a statistic of one column."""
    return float(values.mean())


def array_median(values: Values) -> float:
    """Median, as a statistic of one column."""
    return float(np.median(values))


def ratio_of_medians(first: Values, second: Values) -> float:
    """Median of `first` over median of `second`: how many times sooner, for times of one and the same thing."""
    return float(np.median(first) / np.median(second))
