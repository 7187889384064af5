"""Table T5: three engines, as `benchmarks/engines/suite_engines.py` measures them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.bench.panels import Bars, Series

from .cells import Result, Row, number, ranged, table, text

if TYPE_CHECKING:
    from kvgraft.bench.panels import Panel


def _rate(row: Row) -> str:
    """The highest rate that was sustained; 0 is a rate, too."""
    if row.get("requests_per_s") is None:
        return ""
    rate = f"{row['requests_per_s']:.2f}" if row["requests_per_s"] else "none of those tried"
    return f"{rate} ({row['limit_ms']:,.0f} ms)"


_SPEEDUP, _REUSED = ranged("ttft_ratio", ".2f", "x"), number("reused_share", ".0%")
_COLUMNS = (
    ("engine", text("engine")),
    ("prompts", text("workload")),
    ("variant", text("variant")),
    ("reused", _REUSED),
    ("TTFT p50", number("ttft_ms", unit=" ms")),
    ("p95", number("ttft_p95_ms", unit=" ms")),
    ("speed-up over off", _SPEEDUP),
    ("same first token", number("same_first_token_share", ".0%")),
    ("requests/s within the limit", _rate),
)


BLOCKS = {"engines": lambda result: table(_COLUMNS, result["rows"], num_names=3)}


def panels(result: Result) -> list[Panel]:
    """Speed-ups and times by engine and prompts."""
    rows = [row for row in result["rows"] if "failure" not in row]
    places = list(dict.fromkeys((row["engine"], row["workload"]) for row in rows))
    names = [f"{engine}, {workload}" for engine, workload in places]
    known = {(row["engine"], row["workload"], row["variant"]): row for row in rows}
    variants = list(dict.fromkeys(row["variant"] for row in rows))

    def series(field: str) -> list[Series]:
        return [
            Series.of(variant, [known.get((*place, variant), {}) for place in places], field) for variant in variants
        ]

    return [
        Bars("speed-up of the first token over off", names, series("ttft_ratio"), mark=1),
        Bars("time to first token, median, ms", names, series("ttft_ms")),
        Bars("time to first token, p95, ms", names, series("ttft_p95_ms")),
    ]
