"""`kvgraft bench suite page`: the page of all tables, from their records."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvgraft.cli.output_files import check_output

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from kvgraft.bench.suite.page import Record


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "page",
        help="the page of all tables, from their records",
        description="Write the tables as Markdown from records that benchmarks/record.py has made of them. Measures nothing.",
    )
    parser.add_argument("records", nargs="+", metavar="RECORD", help="records of tables, suite-*.json")
    parser.add_argument("--output", metavar="FILE", help="write the page there instead of printing it")
    parser.add_argument("--plot", metavar="FILE", help="write a PNG of time to first token over length (T1)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the page."""
    from kvgraft.bench.suite.page import load_record, page

    for name in ("output", "plot"):
        if getattr(args, name) is not None:
            check_output(name, Path(getattr(args, name)))
    # By name without the ending, which shells sort in several ways.
    records = [load_record(path) for path in sorted(map(Path, args.records), key=lambda path: path.stem)]
    if args.plot is not None:
        _plot(records, Path(args.plot))
    text = page(records)
    if args.output is None:
        print(text, end="")
    else:
        Path(args.output).write_text(text, encoding="utf-8")
    return 0


def _plot(records: Sequence[Record], path: Path) -> None:
    from kvgraft.bench.suite import length, length_page
    from kvgraft.bench.suite.plot import draw_times
    from kvgraft.errors import ConfigError

    record = next((each for each in records if each["result"]["table"] == length.TABLE), None)
    if record is None:
        raise ConfigError("--plot draws table 'length', which is not among the records; add its record")
    settings = record["result"]["settings"]
    draw_times(length_page.draw(record), f"{settings['model']}, {settings['dtype']}, {record['machine']}", path)
