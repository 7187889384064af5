"""Table T10: when the tokens of an answer come."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.bench.panels import Lines, Series

from .cells import Result, Row, number, ranged, table

if TYPE_CHECKING:
    from kvgraft.bench.panels import Panel

_NAMES = ("off", "exact hit")
_COLUMNS = (
    ("prompt", number("length", ",")),
    ("way", lambda row: f"`{row['way']}`" if row["way"] not in _NAMES else str(row["way"])),
    ("computed", number("computed_tokens", ",")),
    ("first token", number("ttft_ms")),
    ("of an exact hit", ranged("ttft_of_hit_ratio", ".2f", "x")),
    ("to the second", number("second_gap_ms")),
    ("all tokens", number("total_ms")),
    ("of off", number("total_of_off_ratio", ".2f", "x")),
)
BLOCKS = {"times": lambda result: table(_COLUMNS, result["rows"], num_names=2)}


def panels(result: Result) -> list[Panel]:
    """First tokens and gaps to the second over lengths."""
    rows: list[Row] = result["rows"]
    lengths = list(dict.fromkeys(row["length"] for row in rows))
    ways = list(dict.fromkeys(row["way"] for row in rows))

    def series(field: str) -> list[Series]:
        return [Series.of(way, [row for row in rows if row["way"] == way], field) for way in ways]

    return [
        Lines("time to first token, ms", "prompt tokens", lengths, series("ttft_ms"), is_log=True),
        Lines("from the first token to the second, ms", "prompt tokens", lengths, series("second_gap_ms"), is_log=True),
    ]
