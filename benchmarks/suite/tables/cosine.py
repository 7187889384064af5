"""Table T11: reuse of prompts by how much alike they look."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.bench.panels import Bars, Series

from ..sources import PUBLIC
from .cells import Result, Row, number, ranged_share, share, table, text
from .datasets import remedy

if TYPE_CHECKING:
    from kvgraft.bench.panels import Panel

_COLUMNS = (
    ("data set", text("dataset")),
    ("cosine", text("bucket")),
    ("prompts", number("requests")),
    ("tokens", number("tokens")),
    ("reused", ranged_share("reused_share")),
    ("bound", share("bound_share")),
    ("half reused", ranged_share("half_share")),
)
_CLAIMED = PUBLIC[0]


def _remedy(result: Result) -> str:
    """Commands for the conversations of which SemBlend gives such figures; empty if they were measured."""
    if _CLAIMED.name in {row["dataset"] for row in result["rows"]}:
        return ""
    return remedy(_CLAIMED.name, _CLAIMED.pack, "cosine --names") + "."


BLOCKS = {"buckets": lambda result: table(_COLUMNS, result["rows"], num_names=2), "remedy": _remedy}


def panels(result: Result) -> list[Panel]:
    """Shares of tokens, and of prompts of which half is reused, by bucket."""
    rows: list[Row] = result["rows"]
    buckets = sorted(dict.fromkeys(row["bucket"] for row in rows), key=lambda name: (name[0] != "b", name))
    known = {(row["dataset"], row["bucket"]): row for row in rows}
    titles = {"prompt tokens reused, %": "reused_share", "prompts with at least half reused, %": "half_share"}
    return [
        Bars(
            title,
            buckets,
            [
                Series.of(name, [known.get((name, bucket), {}) for bucket in buckets], field, 100)
                for name in dict.fromkeys(row["dataset"] for row in rows)
            ],
        )
        for title, field in titles.items()
    ]
