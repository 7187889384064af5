"""`kvgraft bench suite turns`: agents turn by turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.cli.model_options import add_model_options
from kvgraft.cli.suite_table import (
    add_clock_option,
    add_journal_options,
    check_at_least,
    load_table_llm,
    measure_table,
)

if TYPE_CHECKING:
    import argparse


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the table."""
    parser = subparsers.add_parser(
        "turns",
        help="T4: agents turn by turn",
        description="Ask every turn of a scripted coding agent with reuse off, with exact prefixes, as by default, and so "
        "with time to heal between turns, kind by kind (see 'kvgraft bench pack agent').",
    )
    add = parser.add_argument
    add("--only", nargs="+", default=[], metavar="KIND", help="kinds of agents (default: all)")
    add("--turns", type=int, default=20, metavar="N", help="turns of each kind (default 20)")
    add("--files", type=int, default=4, metavar="N", help="files in every context (default 4)")
    add(
        "--max-characters",
        type=int,
        default=24_000,
        metavar="N",
        help="sessions end where a prompt would be longer; about 3 are a token (default 24000)",
    )
    add("--min-run", type=int, default=32, metavar="N", help="shortest run that planning counts (default 32)")
    add_clock_option(parser)
    add_journal_options(parser)
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure every kind."""
    check_at_least(args, turns=2, files=1, max_characters=1000, min_run=16)
    from kvgraft.bench.suite import turns

    settings = turns.TurnsSettings(
        kinds=tuple(args.only),
        turns=args.turns,
        files=args.files,
        max_characters=args.max_characters,
        min_run=args.min_run,
        clock=args.clock,
        seed=args.seed,
    )
    llm = load_table_llm(args)
    measure_table(args, turns, settings, llm, total=(len(settings.chosen) * settings.turns, "turns"))
    return 0
