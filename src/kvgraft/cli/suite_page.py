"""`kvgraft bench suite page`: the page of all tables, from their records."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from kvgraft.cli.output_files import check_output, check_output_folder

if TYPE_CHECKING:
    import argparse


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "page",
        help="the page of all tables, from their records",
        description="Write the tables as Markdown from records that benchmarks/record.py has made of them. Measures nothing.",
    )
    parser.add_argument("records", nargs="+", metavar="RECORD", help="records of tables, suite-*.json")
    parser.add_argument("--output", metavar="FILE", help="write the page there instead of printing it")
    parser.add_argument("--plots", metavar="DIR", help="draw a picture per table there, suite-TABLE.png, and show them")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the page."""
    from kvgraft.bench.suite.page import draw_pictures, load_record, page

    if args.output is not None:
        check_output("output", Path(args.output))
    # By name without the ending, which shells sort in several ways.
    records = [load_record(path) for path in sorted(map(Path, args.records), key=lambda path: path.stem)]
    pictures = ""
    if args.plots is not None:
        folder = Path(args.plots)
        check_output_folder("plots", folder)
        draw_pictures(records, folder)
        pictures = Path(os.path.relpath(folder, Path(args.output or ".").parent)).as_posix()
    text = page(records, pictures)
    if args.output is None:
        print(text, end="")
    else:
        Path(args.output).write_text(text, encoding="utf-8")
    return 0
