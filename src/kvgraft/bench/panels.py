"""Contents of a picture as data: lines over a number, bars by name, points in a plane. `bench.figure` draws them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Series:
    """Figures of one kind, one per place of the panel, None for not measured; `low` and `high` are their intervals."""

    name: str
    values: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()

    @classmethod
    def of(cls, name: str, rows: Sequence[Mapping[str, float | None]], field_name: str, factor: float = 1.0) -> Series:
        """Take a field of every row, with `{field_name}_low` and `{field_name}_high` where rows have them."""
        values, low, high = (
            [None if row.get(each) is None else factor * (row[each] or 0.0) for row in rows]
            for each in (field_name, f"{field_name}_low", f"{field_name}_high")
        )
        return cls(name, values, low, high)


@dataclass(frozen=True, slots=True)
class Lines:
    """A line per series over `places`, ascending numbers with a `label`.

    With `is_log` both scales are logarithmic, and numbers double from mark to mark.
    """

    title: str
    label: str
    places: Sequence[float]
    series: Sequence[Series]
    is_log: bool = False


@dataclass(frozen=True, slots=True)
class Bars:
    """A group of bars per name in `places`, from above, one bar per series; `is_log` makes the scale logarithmic.

    A line is drawn across all bars at `mark`, such as 1 for ratios; None for no line.
    """

    title: str
    places: Sequence[str]
    series: Sequence[Series]
    mark: float | None = None
    is_log: bool = False


@dataclass(frozen=True, slots=True)
class NamedPoint:
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
    groups: Mapping[str, Sequence[NamedPoint]] = field(default_factory=dict)
    y_linear_below: float | None = None


Panel = Lines | Bars | Points
