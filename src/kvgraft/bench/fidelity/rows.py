"""From records of requests to rows of a table: means, medians, the worst tenth, and how certain they are.

Only requests of which something was grafted count for fidelity. Intervals are percentile bootstraps over requests, or over
groups where the suite has enough of them, since requests of one group are not independent. All settings of a suite are
resampled by the same draws, so that their difference is not blurred by which requests were drawn.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from kvgraft.bench.fidelity.distance import CLASSES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from kvgraft.bench.fidelity.settings import Setting

    Record = Mapping[str, Any]
    Values = NDArray[np.float64]

ALL_SUITES = "all"
CONTROLS = {"exact": "exact prefix", "negative": "unseen text", "noise": "number format"}
RESAMPLES = 1000
_REUSED = ("exact_tokens", "continued_tokens", "shifted_tokens")
"""Figures of reused tokens; older records have fewer."""
_INTERVAL = (2.5, 97.5)
_FEWEST_GROUPS = 10
"""A bootstrap over fewer groups says nothing; requests are drawn then."""


def reused_tokens(figures: Record) -> int:
    """Return the prompt tokens of a request that were not computed, from the figures of `measure.shares`."""
    return int(sum(figures.get(name, 0) for name in _REUSED))


def worst_tenth(values: Values) -> float:
    """Return the mean of the largest tenth, of one value at least."""
    return float(np.sort(values)[-max(1, math.ceil(len(values) / 10)) :].mean())


def _mean(values: Values) -> float:
    return float(values.mean())


def _median(values: Values) -> float:
    return float(np.median(values))


_STATISTICS: dict[str, tuple[str, Callable[[Values], float]]] = {
    "mean_kl": ("mean_kl", _mean),
    "median_kl": ("mean_kl", _median),
    "worst_tenth_kl": ("mean_kl", worst_tenth),
    "mean_js": ("mean_js", _mean),
    "first_kl": ("first_kl", _mean),
    "median_first_kl": ("first_kl", _median),
    "first_flip": ("first_flip", _mean),
    "top1": ("top1", _mean),
    "greedy_equal": ("greedy_equal", _mean),
    "first_divergence": ("first_divergence", _mean),
    "recomputed_share": ("recomputed_share", _mean),
    "flops_share": ("flops_share", _mean),
    "gold_nll_delta": ("gold_nll_delta", _mean),
    "task_off": ("task_off", _mean),
    "task_on": ("task_on", _mean),
    "contains_off": ("contains_off", _mean),
    "contains_on": ("contains_on", _mean),
    "stale_off": ("stale_off", _mean),
    "stale_on": ("stale_on", _mean),
}
"""By the name in the row: the figure of a request, and how figures are put together."""

_BY_DISTANCE = ("mean_kl", "first_kl", "top1", "greedy_equal")


def summary_rows(records: Sequence[Record], settings: Sequence[Setting], seed: int) -> list[dict[str, Any]]:
    """Return a row per suite and setting, and where there are several suites, rows over all of them.

    Args:
        records: Of requests, in order.
        settings: What was compared.
        seed: Of the resampling.
    """
    suites = list(dict.fromkeys(record["suite"] for record in records))
    named = {suite: [record for record in records if record["suite"] == suite] for suite in suites}
    if len(suites) > 1:
        named[ALL_SUITES] = list(records)
    return [
        _row(suite, setting, chosen, resampled)
        for suite, chosen in named.items()
        for resampled in [resamples([(record["suite"], _cluster(record)) for record in chosen], seed)]
        for setting in settings
    ]


def control_rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return a row per suite and control, without intervals: they are compared with zero or with errors far above."""
    rows = []
    for suite in dict.fromkeys(record["suite"] for record in records):
        for name in CONTROLS:
            found = [
                record["controls"][name]
                for record in records
                if record["suite"] == suite and name in record.get("controls", {})
            ]
            if found:
                grafted = sum(bool(each.get("is_grafted")) for each in found)
                rows.append({"suite": suite, "control": name, "n": len(found), "grafted": grafted} | _statistics(found))
    return rows


def failed_controls(rows: Sequence[Record]) -> list[str]:
    """Say which controls are further from full prefill than another number format is: the instrument is off then.

    Args:
        rows: As `control_rows` returns them. A request that grafted text after all (`grafted`) proves nothing.
    """
    noise = {row["suite"]: row["mean_kl"] for row in rows if row["control"] == "noise"}
    return [
        f"{row['suite']}: control {CONTROLS[row['control']]}: KL {row['mean_kl']:.2g} is above the "
        f"{noise[row['suite']]:.2g} of another number format"
        for row in rows
        if row["control"] != "noise" and not row["grafted"] and row["mean_kl"] > noise[row["suite"]]
    ]


def resamples(clusters: Sequence[object], seed: int) -> list[NDArray[np.int64]]:
    """Draw `RESAMPLES` samples with replacement; returns int64 indices of requests, per sample.

    Args:
        clusters: By request, what it is drawn together with. Where there are few, requests are drawn one by one.
        seed: Of the draws.
    """
    rng = np.random.default_rng(seed)
    members: dict[object, list[int]] = {}
    for index, cluster in enumerate(clusters):
        members.setdefault(cluster, []).append(index)
    groups = [np.asarray(group, np.int64) for group in members.values()]
    if len(groups) < _FEWEST_GROUPS:
        groups = [np.asarray([index], np.int64) for index in range(len(clusters))]
    return [np.concatenate([groups[i] for i in rng.integers(len(groups), size=len(groups))]) for _ in range(RESAMPLES)]


def _cluster(record: Record) -> object:
    return record["group"]


def _row(
    suite: str, setting: Setting, records: Sequence[Record], resampled: Sequence[NDArray[np.int64]]
) -> dict[str, Any]:
    figures = [_figures(record, setting.label) for record in records]
    is_grafted = np.array([found is not None and found["is_grafted"] for found in figures], dtype=bool)
    grafted = [found for found in figures if found is not None and found["is_grafted"]]
    columns = {
        name: np.array([_value(found, name) for found in figures])
        for name in {name for name, _ in _STATISTICS.values()}
    }
    ci = {
        name: _interval(np.where(is_grafted, columns[figure], np.nan), statistic, resampled)
        for name, (figure, statistic) in _STATISTICS.items()
    }
    # Where the cheapest setting grafts nothing, the others were not tried: nothing is reused by them either.
    chosen = [found or next(iter(record["settings"].values())) for found, record in zip(figures, records, strict=True)]
    tokens = sum(found["prompt_tokens"] for found in chosen)
    return {
        "suite": suite,
        "policy": setting.policy.name,
        "correction": setting.correction,
        "budget": setting.budget,
        "setting": setting.label,
        **_statistics(grafted),
        "n": len(grafted),
        "requests": len(records),
        "grafted_requests": len(grafted),
        "reused_share": sum(map(reused_tokens, chosen)) / max(tokens, 1),
        "ci": {name: interval for name, interval in ci.items() if interval is not None},
        "by_distance": _by_distance(grafted),
    }


def _figures(record: Record, label: str) -> dict[str, Any] | None:
    """Return the figures of a request under a setting, those of full prefill beside them."""
    found = record["settings"].get(label)
    if found is None:
        return None
    figures = dict(found)
    for name in ("task", "contains", "stale"):
        if name in found and name in record["off"]:
            figures |= {f"{name}_on": found[name], f"{name}_off": record["off"][name]}
    if "gold_nll" in found and "gold_nll" in record["off"]:
        figures["gold_nll_delta"] = found["gold_nll"] - record["off"]["gold_nll"]
    return figures


def _value(figures: Mapping[str, Any] | None, name: str) -> float:
    return math.nan if figures is None else float(figures.get(name, math.nan))


def _statistics(figures: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return every statistic of the requests that have its figure; None where none has."""
    values = {}
    for name, (figure, statistic) in _STATISTICS.items():
        known = np.array([found[figure] for found in figures if figure in found], dtype=np.float64)
        values[name] = statistic(known) if len(known) else None
    return values


def _interval(
    column: Values, statistic: Callable[[Values], float], resampled: Sequence[NDArray[np.int64]]
) -> list[float] | None:
    """Return the 95 % interval of a statistic over the requests that have a value; None for fewer than two."""
    known = ~np.isnan(column)
    if known.sum() < 2:
        return None
    drawn = (column[indices][known[indices]] for indices in resampled)
    low, high = np.percentile([statistic(values) for values in drawn if len(values)], _INTERVAL)
    return [float(low), float(high)]


def _by_distance(figures: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    classes: dict[str, dict[str, float | None]] = {}
    for name in CLASSES:
        found = [each for each in figures if each.get("distance") == name]
        if found:
            statistics = _statistics(found)
            classes[name] = {"n": len(found), **{each: statistics[each] for each in _BY_DISTANCE}}
    return classes
