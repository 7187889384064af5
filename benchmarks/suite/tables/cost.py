"""Table T8: what reuse costs, and when it pays."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.bench.panels import Bars, Series

from .cells import NOTHING, Result, Row, lines, number, table, text

if TYPE_CHECKING:
    from kvgraft.bench.panels import Panel

_MEMORY = (("memory per token", text("step")), ("what", text("what")), ("size", number("bytes", unit=" bytes")))


def _figure(row: Row) -> str:
    """Milliseconds of a step, or the share of the break-even rate."""
    if "share" in row:
        return NOTHING if row["share"] is None else f"{100 * row['share']:.2g} %"
    median, p95 = row["per_1k_tokens_ms"], row["per_1k_tokens_p95_ms"]
    return NOTHING if median is None else f"{median:,.2f} ({p95:,.2f})"


def _steps(result: Result) -> str:
    """A line per step, a column per length."""
    rows = [row for row in result["rows"] if "length" in row]
    lengths = sorted({row["length"] for row in rows})
    known = {(row["length"], row["step"]): row for row in rows}
    named = {row["step"]: row["what"] for row in rows}
    return lines(
        ("step", "what", *(f"prompts of {length:,}" for length in lengths)),
        [[step, what, *(_figure(known[length, step]) for length in lengths)] for step, what in named.items()],
    )


def _claims(result: Result) -> str:
    ours = [f"{_figure(row)} at {row['length']:,} tokens" for row in result["rows"] if "share" in row]
    return lines(("claim", "SemBlend says", "ours, measured"), [["break-even hit rate", "5 %", "; ".join(ours)]])


BLOCKS = {
    "steps": _steps,
    "claims": _claims,
    "memory": lambda result: table(_MEMORY, [row for row in result["rows"] if "bytes" in row]),
}


def panels(result: Result) -> list[Panel]:
    """Milliseconds of every step by length."""
    rows = [row for row in result["rows"] if row.get("per_1k_tokens_ms") is not None]
    steps = list(dict.fromkeys(row["step"] for row in rows))
    known = {(row["length"], row["step"]): row for row in rows}
    series = [
        Series.of(f"prompts of {length:,}", [known.get((length, step), {}) for step in steps], "per_1k_tokens_ms")
        for length in sorted({row["length"] for row in rows})
    ]
    return [Bars("milliseconds per 1,000 tokens", steps, series, is_log=True)]
