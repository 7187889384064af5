"""Measure a table of docs/results.md, or write the page and its pictures from committed records.

python -m benchmarks.suite TABLE --model smollm2-135m --json      # what benchmarks/record.py keeps
python -m benchmarks.suite page                                   # write the tables of all records into docs/results.md
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvgraft.cli import run_command
from kvgraft.cli.output_files import check_output_folder
from kvgraft.cli.parser import Parser

from . import answers, cosine, cost, datasets, length, quality, recorded, repair, similarity, turns
from .command import add_table_options, run_table
from .page import draw_pictures, load_records, update

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

ROOT = Path(__file__).parents[2]
TABLES = (
    length.TABLE,
    similarity.TABLE,
    datasets.TABLE,
    turns.TABLE,
    quality.TABLE,
    cost.TABLE,
    repair.TABLE,
    answers.TABLE,
    cosine.TABLE,
    recorded.TABLE,
)
"""In the order of the page; the others are measured by scripts of `benchmarks/engines` and `benchmarks/peers`."""


def build_parser() -> Parser:
    """Return the parser of all tables and of the page."""
    parser = Parser(prog="python -m benchmarks.suite", description=__doc__.splitlines()[0])
    base: argparse.ArgumentParser = parser
    commands = base.add_subparsers(metavar="TABLE", required=True)
    for table in TABLES:
        command = commands.add_parser(table.name, help=table.title, description=table.about)
        add_table_options(command, table)
        command.set_defaults(run=partial(run_table, table=table))
    command = commands.add_parser("page", help="docs/results.md from its records", description="Measures nothing.")
    command.add_argument("--page", default=str(ROOT / "docs/results.md"), metavar="FILE", help="Markdown with markers")
    command.add_argument("--results", default=str(ROOT / "benchmarks/results"), metavar="DIR", help="folder of records")
    command.add_argument("--plots", metavar="DIR", help="draw a picture per table there, suite-TABLE.png")
    command.set_defaults(run=run_page)
    return parser


def run_page(args: argparse.Namespace) -> int:
    """Write the tables of all records between the markers of the page."""
    records = load_records(Path(args.results))
    page = Path(args.page)
    page.write_text(update(page.read_text(encoding="utf-8"), records), encoding="utf-8")
    if args.plots is not None:
        check_output_folder("plots", Path(args.plots))
        draw_pictures(records.values(), Path(args.plots))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code."""
    return run_command(build_parser, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
