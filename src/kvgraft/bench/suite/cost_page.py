"""Table T8 as Markdown. Measures nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvgraft.bench.panels import Bars, Series
from kvgraft.bench.suite.cells import NOTHING, number, table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvgraft.bench.panels import Panel

    Row = Mapping[str, Any]


def render(record: Mapping[str, Any]) -> str:
    """Return the table and what belongs to it.

    Args:
        record: As `benchmarks/record.py` writes it.
    """
    result = record["result"]
    settings, rows = result["settings"], result["rows"]
    lengths = sorted({row["length"] for row in rows if "length" in row})
    steps = list(dict.fromkeys(row["step"] for row in rows if "per_1k_tokens_ms" in row))
    known = {(row.get("length"), row["step"]): row for row in rows}
    columns = ["step", "what", *(f"prompts of {length:,}" for length in lengths)]
    lines = [
        [step, known[lengths[0], step]["what"], *(_milliseconds(known[length, step]) for length in lengths)]
        for step in steps
    ]
    even = "break-even hit rate"
    lines.append(
        [even, known[lengths[0], even]["what"], *(_percent(known[length, even]["share"]) for length in lengths)]
    )
    return "\n\n".join(
        [
            f"{settings['model']}, {settings['dtype']}; milliseconds per 1,000 tokens, medians of {settings['rounds']} "
            f"rounds and (p95), with {settings['num_donors']} other texts in the catalogue. Lookup, registration and copies "
            "are called by themselves; the others are differences of whole requests.",
            table(columns, lines),
            _memory(rows),
            "SemBlend's README gives 5 ms for an embedding on a GPU. On a processor we measured 325 ms for the 4,000 "
            "characters that it embeds, and 17-26 ms for its search and alignment at 4K tokens; lookup and register, "
            "above, see every token.",
            "**What this does not show.** Many tenants, donors in stores, or a catalogue of a million texts, whose lookups "
            "are in [benchmarks.md](benchmarks.md#how-fast-a-lookup-is). The break-even rate counts what is paid for prompts "
            "that find nothing; memory that donors take from other uses is not in it.",
        ]
    )


def panels(record: Mapping[str, Any]) -> list[Panel]:
    """Return the pictures of the table, from left to right.

    Args:
        record: As `benchmarks/record.py` writes it.
    """
    rows = [row for row in record["result"]["rows"] if row.get("per_1k_tokens_ms") is not None]
    steps = list(dict.fromkeys(row["step"] for row in rows))
    known = {(row["length"], row["step"]): row for row in rows}
    series = [
        Series.of(f"prompts of {length:,}", [known.get((length, step), {}) for step in steps], "per_1k_tokens_ms")
        for length in sorted({row["length"] for row in rows})
    ]
    return [Bars("milliseconds per 1,000 tokens", steps, series, is_log=True)]


def _milliseconds(row: Row) -> str:
    if row["per_1k_tokens_ms"] is None:
        return NOTHING
    return f"{number(row['per_1k_tokens_ms'], ',.2f')} ({number(row['per_1k_tokens_p95_ms'], ',.2f')})"


def _percent(share: float | None) -> str:
    return NOTHING if share is None else f"{100 * share:.2g} %"


def _memory(rows: Sequence[Row]) -> str:
    lines = [[row["step"], row["what"], f"{number(row['bytes'], ',.0f')} bytes"] for row in rows if "bytes" in row]
    return table(("memory per token", "what", "size"), lines)
