"""Markdown tables of rows: columns are pairs of a title and a function that writes a row's cell; no figure is a dash."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Result = Mapping[str, Any]
Cell = Callable[[Row], str]
Columns = Sequence[tuple[str, Cell]]

NOTHING = "-"


def table(columns: Columns, rows: Sequence[Row], *, num_names: int = 1) -> str:
    """Return a line per row; a row with a `failure` has that after its first `num_names` cells, which name it."""
    return lines([title for title, _ in columns], [_line(columns, row, num_names) for row in rows])


def lines(head: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Return a table of cells that are written already."""
    written = ["| " + " | ".join(line) + " |" for line in (head, *cells)]
    return "\n".join([written[0], "|" + "---|" * len(head), *written[1:]])


def claims(
    head: Sequence[str],
    claimed: Sequence[tuple[str, str, Sequence[str]]],
    measured: Mapping[str, str],
    remedies: Mapping[str, str] | None = None,
) -> str:
    """Return a table of what others say, beside our figures.

    Args:
        head: Of the three columns.
        claimed: Subject, their words, and the names of our rows that answer it.
        measured: Figures of those rows by name.
        remedies: By subject, how to measure what was not; stands after the figures.
    """
    written = []
    for about, says, names in claimed:
        found = [measured[name] for name in names if name in measured]
        found += [remedies[about]] if remedies and about in remedies else []
        written.append([about, says, "; ".join(found) or "not measured"])
    return lines(head, written)


def text(name: str) -> Cell:
    """A field as it is."""
    return lambda row: str(row[name])


def number(name: str, form: str = ",.0f", unit: str = "") -> Cell:
    """A number in a format of Python's."""
    return lambda row: NOTHING if row[name] is None else f"{row[name]:{form}}{unit}"


def share(name: str) -> Cell:
    """A share as percent, to a tenth."""
    return lambda row: NOTHING if row[name] is None else f"{row[name]:.1%}".replace("%", " %")


def time(name: str) -> Cell:
    """Milliseconds: the median and, in brackets, the 95th percentile, which a single round does not have."""

    def write(row: Row) -> str:
        median, p95 = row[f"{name}_ms"], row[f"{name}_p95_ms"]
        return number(f"{name}_ms")(row) + ("" if median == p95 else f" ({p95:,.0f})")

    return write


def ranged(name: str, form: str = ".2f", unit: str = "") -> Cell:
    """A figure with its interval, where the row has one that is not the figure itself."""

    def write(row: Row) -> str:
        found, low, high = (row.get(f"{name}{end}") for end in ("", "_low", "_high"))
        if found is None:
            return NOTHING
        interval = "" if low is None or high is None or low == high else f" [{low:{form}}, {high:{form}}]"
        return f"{found:{form}}{unit}{interval}"

    return write


def ranged_share(name: str) -> Cell:
    """A share as percent, to a tenth, with its interval where the row has one that is not the share itself."""

    def write(row: Row) -> str:
        percents = {
            f"{name}{end}": value * 100
            for end in ("", "_low", "_high")
            if (value := row.get(f"{name}{end}")) is not None
        }
        return ranged(name, ".1f", " %")(percents)

    return write


def sides(name: str) -> Cell:
    """The figures of a request without and with reuse."""

    def write(row: Row) -> str:
        off, on = row.get(f"{name}_off"), row.get(f"{name}_on")
        return NOTHING if off is None or on is None else f"{off:.2f} / {on:.2f}"

    return write


def _line(columns: Columns, row: Row, num_names: int) -> list[str]:
    if "failure" not in row:
        return [cell(row) for _, cell in columns]
    names = [cell(row) for _, cell in columns[:num_names]]
    return [*names, f"failed: {row['failure']}", *[""] * (len(columns) - num_names - 1)]
