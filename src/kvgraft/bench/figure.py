"""Draw panels beside one another into a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvgraft.bench.drawing import Figure, FuncFormatter, NullFormatter
from kvgraft.bench.panels import Bars, Lines, Points

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

    from kvgraft.bench.panels import Panel, Series

_WIDTH = 6.4
_MOST_MARKS = 24
"""Places that are marked one by one; numbers of more would cover one another."""
_MARKERS = "osD^vP*Xh<>"


def draw_panels(panels: Sequence[Panel], title: str, path: Path, *, source: str = "") -> None:
    """Write a PNG of `panels` from left to right, `title` above them; `source` is kept in the file as its comment."""
    height = max(3.6, *(_height(panel) for panel in panels))
    figure = Figure(figsize=(_WIDTH * len(panels), height), dpi=110, layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        if isinstance(panel, Lines):
            _draw_lines(axes, panel)
        elif isinstance(panel, Bars):
            _draw_bars(axes, panel)
        else:
            _draw_points(axes, panel)
        axes.set_title(panel.title, fontsize=10, loc="left")
        axes.grid(visible=True, which="major", axis="x" if isinstance(panel, Bars) else "both", alpha=0.25)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.suptitle(title, fontsize=10)
    # Without the library's version in it, a picture of the same figures is the same file.
    figure.savefig(path, format="png", metadata={"Software": None, "Comment": source})


def _height(panel: Panel) -> float:
    if isinstance(panel, Bars):
        return 1.4 + len(panel.places) * (0.16 * len(panel.series) + 0.1)
    return 4.4


def _draw_lines(axes: Axes, panel: Lines) -> None:
    for series in panel.series:
        axes.errorbar(
            panel.places, _numbers(series), xerr=None, yerr=_errors(series), marker="o", linewidth=1.8, capsize=2,
            label=series.name,
        )  # fmt: skip
    if panel.is_log:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            _tell_numbers(axis)
    if len(panel.places) <= _MOST_MARKS:
        axes.set_xticks(panel.places)
    axes.set_xlabel(panel.label)
    axes.legend(frameon=False, fontsize=8)


def _draw_bars(axes: Axes, panel: Bars) -> None:
    places = np.arange(len(panel.places), dtype=float)
    thickness = 0.8 / len(panel.series)
    for index, series in enumerate(panel.series):
        offsets = places + (index - (len(panel.series) - 1) / 2) * thickness
        axes.barh(offsets, _numbers(series), thickness, label=series.name)
        errors = _errors(series)
        if errors is not None:
            axes.errorbar(
                _numbers(series), offsets, xerr=errors, linestyle="none", color="black", linewidth=0.8, capsize=1.5
            )
    axes.set_yticks(places, panel.places, fontsize=8)
    if panel.is_log:
        axes.set_xscale("log")
        _tell_numbers(axes.xaxis)
    if panel.mark is not None:
        axes.axvline(panel.mark, color="black", linewidth=0.8, linestyle=":")
    axes.set_ylim(len(places) - 0.5, -0.5)
    if len(panel.series) > 1:
        below = (0.0, -0.3 / _height(panel))
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=below, ncols=4)


def _draw_points(axes: Axes, panel: Points) -> None:
    for index, (group, points) in enumerate(panel.groups.items()):
        colour, marker = f"C{index % 10}", _MARKERS[index % len(_MARKERS)]
        for point in points:
            face = "none" if point.is_hollow else colour
            axes.plot(point.x, point.y, marker=marker, color=colour, markerfacecolor=face, linestyle="none")
            if len(points) > 1:
                axes.annotate(
                    point.name, (point.x, point.y), xytext=(4, 3), textcoords="offset points", fontsize=6, color=colour
                )
        axes.plot([], [], marker=marker, color=colour, linestyle="none", label=group)
    if panel.y_linear_below is not None:
        axes.set_yscale("symlog", linthresh=panel.y_linear_below)
        axes.set_ylim(bottom=-panel.y_linear_below / 2)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.legend(frameon=False, fontsize=8)


def _numbers(series: Series) -> list[float]:
    return [np.nan if value is None else value for value in series.values]


def _errors(series: Series) -> tuple[list[float], list[float]] | None:
    """Return how far intervals reach below and above; no mark where a figure has none, or one without width."""
    if all(end is None for end in (*series.low, *series.high)):
        return None
    ends = [_reach(*each) for each in zip(series.values, series.low, series.high, strict=True)]
    return [below for below, _ in ends], [above for _, above in ends]


def _reach(value: float | None, low: float | None, high: float | None) -> tuple[float, float]:
    if value is None or low is None or high is None or low >= high:
        return np.nan, np.nan
    return max(0.0, value - low), max(0.0, high - value)


def _tell_numbers(axis: Axis) -> None:
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_formatter(NullFormatter())
