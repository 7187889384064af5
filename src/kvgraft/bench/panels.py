"""What a picture shows, as data: lines over a number, bars by name, points in a plane. `bench.figure` draws it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Series:
    """Figures of one kind.

    Attributes:
        name: For the legend.
        values: One per place of the panel; None where nothing was measured.
        low: Lower ends of their intervals, or nothing.
        high: Upper ends.
    """

    name: str
    values: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()

    @classmethod
    def of(cls, name: str, rows: Sequence[Mapping[str, float | None]], field_name: str, factor: float = 1.0) -> Series:
        """A field of every row, with `{field_name}_low` and `{field_name}_high` where rows have them."""
        values, low, high = (
            [None if row.get(each) is None else factor * (row[each] or 0.0) for row in rows]
            for each in (field_name, f"{field_name}_low", f"{field_name}_high")
        )
        return cls(name, values, low, high)


@dataclass(frozen=True, slots=True)
class Lines:
    """A line per series over numbers.

    Attributes:
        title: What the figures are, with their unit.
        label: What the numbers below are.
        places: These, ascending.
        series: One figure per place each.
        is_log: Both scales are logarithmic, and numbers double from mark to mark.
    """

    title: str
    label: str
    places: Sequence[float]
    series: Sequence[Series]
    is_log: bool = False


@dataclass(frozen=True, slots=True)
class Bars:
    """A group of bars per name, one bar per series.

    Attributes:
        title: What the figures are, with their unit.
        places: Names, from above.
        series: One figure per name each.
        mark: Where a line is drawn across all bars, such as 1 for ratios; None for no line.
        is_log: The scale is logarithmic.
    """

    title: str
    places: Sequence[str]
    series: Sequence[Series]
    mark: float | None = None
    is_log: bool = False


@dataclass(frozen=True, slots=True)
class Point:
    """A named point; hollow if it is something to beware of."""

    name: str
    x: float
    y: float
    is_hollow: bool = False


@dataclass(frozen=True, slots=True)
class Points:
    """Points in a plane.

    Attributes:
        title: What is above what.
        x_label: What lies to the right, with its unit.
        y_label: What lies above, with its unit.
        groups: Points by the name of what they have in common. Where a group is of one point, that is its name.
        y_linear_below: The upper scale is logarithmic above this and linear below, so that 0 is on it; None for linear.
    """

    title: str
    x_label: str
    y_label: str
    groups: Mapping[str, Sequence[Point]] = field(default_factory=dict)
    y_linear_below: float | None = None


Panel = Lines | Bars | Points
