"""Cells and tables of Markdown for the tables' pages; a figure that was not measured is a dash."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Row = Mapping[str, float | str | None]

NOTHING = "-"


def share(value: float | str | None) -> str:
    """A share as percent."""
    return NOTHING if value is None else f"{float(value):.1%}".replace("%", " %")


def number(value: float | str | None, form: str = ".3g") -> str:
    """A number in a format of Python's."""
    return NOTHING if value is None else format(float(value), form)


def with_range(row: Row, name: str, form: str = ".2f", unit: str = "") -> str:
    """A figure with its interval, where the row has one."""
    low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
    found = row.get(name)
    if found is None:
        return NOTHING
    interval = "" if low is None or high is None else f" [{number(low, form)}, {number(high, form)}]"
    return number(found, form) + unit + interval


def sides(row: Row, name: str, form: str = ".2f") -> str:
    """The figures of a request without and with reuse."""
    off, on = row.get(f"{name}_off"), row.get(f"{name}_on")
    return NOTHING if off is None or on is None else f"{number(off, form)} / {number(on, form)}"


def claims(head: Sequence[str], told: Sequence[tuple[str, str, Sequence[str]]], measured: Mapping[str, str]) -> str:
    """A table of what others say.

    Args:
        head: Of the three columns.
        told: What it is about, what they say, and the names of our rows that answer it.
        measured: What those rows say, by name; those that are not there were not measured.
    """
    lines = [
        [about, says, "; ".join(measured[name] for name in names if name in measured) or "not measured"]
        for about, says, names in told
    ]
    return table(head, lines)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, its first column aligned left as the others are."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
