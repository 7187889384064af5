"""Draw time to first token over length, a line per way to answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

try:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter
except ModuleNotFoundError as missing:
    raise ImportError("--plot needs matplotlib: pip install 'kvgraft[bench]'") from missing

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    Line = tuple[str, Sequence[float], Sequence[float]]


def draw_times(lines: Sequence[Line], title: str, path: Path) -> None:
    """Write a PNG of milliseconds over prompt tokens, both on logarithmic scales."""
    figure = Figure(figsize=(7.5, 4.6), dpi=110, layout="constrained")
    axes = figure.subplots()
    for name, lengths, times in lines:
        axes.plot(lengths, times, marker="o", linewidth=1.8, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel("prompt tokens")
    axes.set_title("time to first token (ms)", fontsize=10, loc="left")
    axes.grid(visible=True, which="major", alpha=0.25)
    axes.legend(frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, format="png")
