"""Table T6: the perplexity ratio, and what it hides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.bench.panels import NamedPoint, Points

from ..methods import ALL_SUITES, OFF, SUBSTITUTED
from .cells import NOTHING, Result, Row, ranged, share, table, text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgraft.bench.panels import Panel


def _method(row: Row) -> str:
    return f"**{row['method']}**" if row["method"] in (OFF, SUBSTITUTED) else str(row["method"])


def _stale(row: Row) -> str:
    return f"{share('stale_share')(row)} of {row['stale_asked']}" if row["stale_asked"] else NOTHING


_COLUMNS = (
    ("answered by", _method),
    ("n", text("requests")),
    ("reused", share("reused_share")),
    ("perplexity ratio", ranged("perplexity_ratio", ".3f")),
    ("mean KL", ranged("mean_kl", ".4f")),
    ("first token flips", share("first_flip_share")),
    ("32 tokens equal", share("greedy_equal_share")),
    ("stale answers", _stale),
)


def _by_suite(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows of every suite, those of all suites first."""
    suites = sorted(dict.fromkeys(row["suite"] for row in rows), key=lambda name: name != ALL_SUITES)
    return {suite: [row for row in rows if row["suite"] == suite] for suite in suites}


def _suites(result: Result) -> str:
    """Rows of all suites together; the record has those of each."""
    return table(_COLUMNS, next(iter(_by_suite(result["rows"]).values())))


BLOCKS = {"suites": _suites}


def panels(result: Result) -> list[Panel]:
    """KL over the perplexity ratio and over reuse, of all suites or of the first."""
    suite, rows = next(iter(_by_suite([row for row in result["rows"] if row["mean_kl"] is not None]).items()))
    return [
        _points(f"what the perplexity ratio hides ({suite})", "perplexity ratio", "perplexity_ratio", 1, rows),
        _points(f"fidelity and reuse ({suite})", "reused, %", "reused_share", 100, rows),
    ]


def _points(title: str, label: str, field: str, factor: float, rows: Sequence[Row]) -> Points:
    groups = {
        row["method"]: [NamedPoint(row["method"], factor * row[field], row["mean_kl"], row["method"] == SUBSTITUTED)]
        for row in rows
        if row[field] is not None
    }
    return Points(title, label, "mean KL to full prefill, nats", groups, y_linear_below=1e-3)
