"""Table T12: what recorded sessions of agent clients cost, by engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.bench.panels import Bars, Series

from .cells import NOTHING, Result, Row, number, share, table, text

if TYPE_CHECKING:
    from kvgraft.bench.panels import Panel


def _worst(row: Row) -> str:
    """The largest lead of exact prefixes at any call; none where they never led."""
    return f"{max(0, row['worst_lead_tokens']):,}"


def _spread(row: Row) -> str:
    return NOTHING if row["spread_share"] is None else f"{row['spread_share']:.1%}".replace("%", " %")


_COLUMNS = (
    ("engine", text("engine")),
    ("client", text("client")),
    ("read before", text("before")),
    ("calls", number("calls")),
    ("tokens", number("tokens")),
    ("exact prefix: computed", number("exact_tokens")),
    ("ours: computed", number("graft_tokens")),
    ("bound", number("bound_tokens")),
    ("ours, of exact's", number("graft_of_exact", ".2f")),
    ("of the bound", number("graft_of_bound", ".3f")),
    ("most behind exact", _worst),
)
_SPREAD = (
    ("engine", text("engine")),
    ("client", text("client")),
    ("read before", text("before")),
    ("secrets", number("secrets")),
    ("(max - min) / median", share("spread_share")),
)


def _again(result: Result) -> list[Row]:
    return [row for row in result["rows"] if row["spread_share"] is not None]


def _spread_table(result: Result) -> str:
    return table(_SPREAD, _again(result), num_names=3) if _again(result) else ""


BLOCKS = {"clients": lambda result: table(_COLUMNS, result["rows"], num_names=3), "spread": _spread_table}


def panels(result: Result) -> list[Panel]:
    """Computed tokens by client, in an engine that has read nothing and at the worst of those that have."""
    rows: list[Row] = [row for row in result["rows"] if "failure" not in row]
    names = [f"{row['client']} after {row['before']}" for row in rows]
    counts = {"exact prefix": "exact_tokens", "ours": "graft_tokens", "bound": "bound_tokens"}
    return [
        Bars("tokens computed", names, [Series.of(label, rows, field) for label, field in counts.items()]),
        Bars("ours, of what exact prefixes compute", names, [Series.of("ours", rows, "graft_of_exact")], mark=1),
    ]
