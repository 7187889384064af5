"""`--plot` of the commands that print tables."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from kvgraft.cli.output_files import check_output

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from kvgraft.bench.panels import Panel


def add_plot_option(parser: argparse.ArgumentParser) -> None:
    """Add `--plot`."""
    parser.add_argument("--plot", metavar="FILE.png", help="draw the table, too")


def check_plot(args: argparse.Namespace) -> None:
    """Refuse a picture that could not be drawn, before what takes an hour is measured.

    Raises:
        ConfigError: It cannot be written there.
        ImportError: matplotlib is not installed.
    """
    if args.plot is not None:
        check_output("plot", Path(args.plot))
        import_module("kvgraft.bench.figure")


def draw_plot(args: argparse.Namespace, panels: Callable[[], Sequence[Panel]], title: str) -> None:
    """Draw panels if the command was asked to."""
    if args.plot is not None:
        from kvgraft.bench.figure import draw_panels

        draw_panels(panels(), title, Path(args.plot))
