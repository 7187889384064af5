"""Table T9: repair before and after the first token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.bench.panels import Bars, Series

from .cells import NOTHING, Cell, Result, Row, number, ranged, ranged_share, share, table, text

if TYPE_CHECKING:
    from kvgraft.bench.panels import Panel


def _setting(row: Row) -> str:
    return f"`{row['setting']}`" if "kl_ratio" in row else str(row["setting"])


def _known(name: str, cell: Cell) -> Cell:
    """Return the cell, a dash for rows of the control, which lack most figures."""
    return lambda row: NOTHING if row.get(name) is None else cell(row)


def _later(name: str) -> Cell:
    return _known(name, number(name, ".2f"))


_COLUMNS = (
    ("setting", _setting),
    ("n", text("requests")),
    ("FLOPs", _known("flops_share", share("flops_share"))),
    ("mean KL", ranged("mean_kl", ".4f")),
    ("KL of `none`'s, all", ranged("kl_ratio")),
    ("token 1", ranged("first_kl_ratio")),
    ("2", _later("kl_ratio_2")),
    ("3-8", _later("kl_ratio_3_8")),
    ("9-32", _later("kl_ratio_9_32")),
    ("2-32", ranged("later_kl_ratio")),
    ("first token flips", ranged_share("first_flip_share")),
    ("32 tokens equal", ranged_share("greedy_equal_share")),
)


def _suites(result: Result) -> str:
    """Rows of all suites together, or of the first; the record has those of each."""
    return table(_COLUMNS, _first_suite(result))


def _first_suite(result: Result) -> list[Row]:
    return [row for row in result["rows"] if row["suite"] == result["rows"][0]["suite"]]


BLOCKS = {"suites": _suites}


def panels(result: Result) -> list[Panel]:
    """Error of the first token and of later ones, as a share of that of `none`."""
    rows = [row for row in _first_suite(result) if "kl_ratio" in row]
    errors = {"token 1": "first_kl_ratio", "tokens 2-32": "later_kl_ratio", "all 32": "kl_ratio"}
    series = [Series.of(name, rows, field, 100) for name, field in errors.items()]
    return [Bars("KL to full prefill, % of none's", [row["setting"] for row in rows], series, mark=25)]
