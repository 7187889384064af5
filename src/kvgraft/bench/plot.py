"""Draw the load test: time to first token and per output token over the rate or the clients, a line per side."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.bench.drawing import Figure, FuncFormatter, LogLocator, NullFormatter

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from kvgraft.bench.summary import RunSummary

_COLOURS = {"off": "#777777", "exact": "#1f77b4", "graft": "#d95f02"}


def draw_load(runs: Sequence[RunSummary], slo_ttft_ms: float | None, title: str, path: Path) -> None:
    """Write a PNG; filled marks are rates that were sustained, hollow ones were not."""
    figure = Figure(figsize=(11, 4.6), dpi=130, layout="constrained")
    left, right = figure.subplots(1, 2)
    for mode in dict.fromkeys(run.mode for run in runs):
        own = sorted((run for run in runs if run.mode == mode), key=_place)
        _draw_mode(left, own, [run.ttft_ms.get("p95") for run in own], slo_ttft_ms)
        _draw_mode(right, own, [run.tpot_ms.get("p50") for run in own], slo_ttft_ms)
    over = "clients" if any(run.clients for run in runs) else "offered requests per second"
    _finish(left, "time to first token, p95 (ms)", over)
    _finish(right, "time per output token, median (ms)", over)
    left.set_yscale("log")
    left.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    left.yaxis.set_minor_formatter(NullFormatter())
    right.set_ylim(bottom=0)
    if slo_ttft_ms is not None:
        left.axhline(slo_ttft_ms, color="black", linestyle=":", linewidth=1, label=f"limit {slo_ttft_ms:.0f} ms")
    left.legend(frameon=False)
    figure.suptitle(title + ("" if over == "clients" else "  (hollow: not sustained)"), fontsize=10)
    figure.savefig(path, format="png")


def _draw_mode(
    axes: Axes, runs: Sequence[RunSummary], values: Sequence[float | None], slo_ttft_ms: float | None
) -> None:
    known = [(run, value) for run, value in zip(runs, values, strict=True) if value is not None]
    if not known:
        return
    mode = known[0][0].mode
    colour = _COLOURS.get(mode)
    axes.plot([_place(run) for run, _ in known], [value for _, value in known], color=colour, linewidth=1.8, label=mode)
    limit = float("inf") if slo_ttft_ms is None else slo_ttft_ms
    for run, value in known:
        fill = colour if run.sustains(limit) else "white"
        axes.plot([_place(run)], [value], marker="o", markersize=6, markerfacecolor=fill, color=colour)


def _place(run: RunSummary) -> float:
    return run.clients or run.rate


def _finish(axes: Axes, label: str, over: str) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel(over)
    axes.set_title(label, fontsize=10, loc="left")
    axes.grid(visible=True, which="major", alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
