"""Draw a calibration: mean loss and its upper limit per notch, of its worst part, and the risk that was asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.bench.drawing import Figure

if TYPE_CHECKING:
    from pathlib import Path

    from kvgraft.fidelity.control import Calibration


def draw_calibration(calibration: Calibration, path: Path) -> None:
    """Write a PNG; filled marks are certified notches."""
    figure = Figure(figsize=(7, 4), dpi=130, layout="constrained")
    axes = figure.subplots()
    for index, result in enumerate(calibration.results):
        worst = result.worst
        colour = "#1b9e77" if result.is_certified else "#d95f02"
        axes.plot([index, index], [100 * worst.mean, 100 * worst.upper_limit], color=colour, linewidth=2)
        axes.plot(
            [index], [100 * worst.mean], "o", color=colour, markerfacecolor=colour if result.is_certified else "white"
        )
    axes.axhline(
        100 * calibration.epsilon, color="black", linestyle=":", linewidth=1, label=f"asked: {calibration.epsilon:.3g}"
    )
    labels = [f"{r.notch}\n{r.worst.part}\n{r.worst.requests} grafted" for r in calibration.results]
    axes.set_xticks(range(len(calibration.results)), labels)
    axes.set_ylabel(f"{calibration.loss}: mean, up to its {1 - calibration.delta:.0%} limit (%)")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    figure.savefig(path, format="png")
