"""Draw error against computed operations: a line per policy and suite with 95 % intervals, dashed if drift is corrected."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvgraft.bench.drawing import Figure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    Row = Mapping[str, Any]

_PANELS = {"mean_kl": "KL to full prefill, nats per token", "first_kl": "KL of the first token, nats"}
_MARKERS = "osD^vP*X"
_COLOURS = [f"C{number}" for number in range(10)]


def draw_fidelity(rows: Sequence[Row], noise: float | None, title: str, path: Path) -> None:
    """Write a PNG.

    Args:
        rows: Of one suite or several; a line of panels for each suite.
        noise: Mean KL of the noise floor, drawn as a line; None for none.
        title: Above all panels.
        path: Where to.
    """
    suites = list(dict.fromkeys(row["suite"] for row in rows))
    figure = Figure(figsize=(11, 1 + 3.6 * len(suites)), dpi=130, layout="constrained")
    panels = figure.subplots(len(suites), len(_PANELS), squeeze=False)
    for suite, line in zip(suites, panels, strict=True):
        for (figure_name, label), axes in zip(_PANELS.items(), line, strict=True):
            own = [row for row in rows if row["suite"] == suite and row[figure_name] is not None]
            _draw(axes, own, figure_name)
            if noise is not None and figure_name == "mean_kl":
                axes.axhline(noise, color="black", linestyle=":", linewidth=1, label="noise floor")
            axes.set_title(f"{suite}: {label}", fontsize=10, loc="left")
            axes.set_xlabel("operations computed, % of full prefill")
            axes.set_yscale("log")
            axes.grid(visible=True, alpha=0.25)
    handles = {
        label: handle for axes in panels.flat for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, format="png")


def _draw(axes: Axes, rows: Sequence[Row], name: str) -> None:
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    for policy, correction in dict.fromkeys((row["policy"], row["correction"]) for row in rows):
        own = sorted(
            (row for row in rows if (row["policy"], row["correction"]) == (policy, correction)),
            key=lambda row: row["flops_share"],
        )
        shares = [100 * row["flops_share"] for row in own]
        values = [row[name] for row in own]
        bounds = [row["ci"].get(name, (value, value)) for row, value in zip(own, values, strict=True)]
        below = [max(0.0, value - low) for value, (low, _) in zip(values, bounds, strict=True)]
        above = [max(0.0, high - value) for value, (_, high) in zip(values, bounds, strict=True)]
        number = policies.index(policy)
        is_corrected = correction != "none"
        axes.errorbar(
            shares,
            values,
            yerr=(below, above),
            marker=_MARKERS[number % len(_MARKERS)],
            color=_COLOURS[number % len(_COLOURS)],
            linestyle="--" if is_corrected else "-",
            markerfacecolor="none" if is_corrected else None,
            capsize=2,
            linewidth=1.4,
            label=f"{policy} + {correction}" if is_corrected else policy,
        )
