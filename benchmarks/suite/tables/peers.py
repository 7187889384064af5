"""Table T7: others that reuse K/V, as `benchmarks/peers/suite_peers.py` measures them."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from kvgraft.bench.panels import Bars, NamedPoint, Points, Series

from .cells import Result, Row, number, ranged, table, text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgraft.bench.panels import Panel

NOISE_SHARE = 0.25
"""Of the gap of unrelated prompts: from there on K/V are not those of the text."""


def allowed_gap(rows: Sequence[Row]) -> float | None:
    """Return the largest gap with one layer that is still rounding of the peer of `rows`; None if it was not measured.

    That is the gap of an equal prefix, or a quarter of the median gap between unrelated prompts if that is more.
    """
    unrelated = [row["one_layer_unrelated_gap"] for row in rows if row.get("one_layer_unrelated_gap") is not None]
    if not unrelated:
        return None
    same = [row["one_layer_gap"] for row in rows if row["case"] == "prefix" and row.get("one_layer_gap") is not None]
    return float(max(NOISE_SHARE * statistics.median(unrelated), *same, 0.0))


def is_right(row: Row, limit: float | None) -> bool | None:
    """Return whether K/V that one layer reused were of these tokens at these positions; None if it reused none."""
    gap = row.get("one_layer_gap")
    if gap is None or limit is None or not row.get("one_layer_reused_tokens"):
        return None
    return bool(gap <= limit)


def _verdict(row: Row) -> str:
    return {True: "yes", False: "**no**", None: "nothing reused"}[row["is_right"]]


_COLUMNS = (
    ("peer", text("peer")),
    ("case", text("case")),
    ("reused", number("reused_share", ".0%")),
    ("speed-up over its own cold run", ranged("ttft_ratio", ".2f", "x")),
    ("gap, nats", number("gap", ".4f")),
    ("K/V are right", _verdict),
)


def _judged(result: Result) -> list[Row]:
    """Rows with the verdict on their K/V."""
    rows = result["rows"]
    limits = {peer: allowed_gap([row for row in rows if row["peer"] == peer]) for peer in {row["peer"] for row in rows}}
    return [row | {"is_right": is_right(row, limits[row["peer"]])} for row in rows]


BLOCKS = {"peers": lambda result: table(_COLUMNS, _judged(result), num_names=2)}


def panels(result: Result) -> list[Panel]:
    """Reuse by case, and gaps over speed-ups."""
    rows = [row for row in _judged(result) if "failure" not in row]
    peers = list(dict.fromkeys(row["peer"] for row in rows))
    cases = list(dict.fromkeys(row["case"] for row in rows))
    known = {(row["peer"], row["case"]): row for row in rows}
    groups = {
        peer: [
            NamedPoint(row["case"], row["ttft_ratio"], row["gap"], row["is_right"] is False)
            for row in rows
            if row["peer"] == peer and row["reused_tokens"]
        ]
        for peer in peers
    }
    reused = [Series.of(peer, [known.get((peer, case), {}) for case in cases], "reused_share", 100) for peer in peers]
    return [
        Bars("prompt tokens reused, %", cases, reused),
        Points(
            "what reuse gives and changes (hollow: K/V of other text)",
            "speed-up over its own cold run",
            "gap of the first token, nats",
            groups,
            y_linear_below=1e-2,
        ),
    ]
