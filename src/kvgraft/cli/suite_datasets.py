"""`kvgraft bench suite datasets`: what data sets share, and what reuse makes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.cli.model_options import add_model_options
from kvgraft.cli.suite_table import (
    add_clock_option,
    add_sample_options,
    check_at_least,
    load_table_llm,
    measure_table,
)

if TYPE_CHECKING:
    import argparse


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the table."""
    parser = subparsers.add_parser(
        "datasets",
        help="T3: what data sets share, and what reuse makes of it",
        description="Count what an exact prefix, aligned chunks, kvgraft and the bound find in every prompt of each data "
        "set, planning only; then time, compare and score a seeded sample of the prompts that fit, with reuse off and with "
        "the engine's own policy. 'builtin' and 'builtin:rag' need no file; packs that are not in --data are left out and "
        "named.",
    )
    add = parser.add_argument
    add("--only", nargs="+", default=[], metavar="NAME", help="rows, packs or families of rows (default: all)")
    add_sample_options(parser, max_prompt_tokens=4608)
    add("--rounds", type=int, default=3, metavar="N", help="how often each request is timed, off and on (default 3)")
    add_clock_option(parser)
    add("--min-run", type=int, default=32, metavar="N", help="shortest run that planning counts (default 32)")
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure every data set that is there; 1 if a plan would have reused a wrong token."""
    check_at_least(args, limit=1, rounds=1, max_prompt_tokens=1, min_run=16)
    from kvgraft.bench.suite import datasets

    settings = datasets.DatasetsSettings(
        names=tuple(args.only),
        data=args.data,
        limit=args.limit,
        rounds=args.rounds,
        clock=args.clock,
        min_run=args.min_run,
        max_prompt_tokens=args.max_prompt_tokens,
        seed=args.seed,
    )
    present = settings.present
    llm = load_table_llm(args)
    rows = measure_table(
        args, datasets, settings, llm, total=(len(present) * (1 + args.limit), "requests"), absent=settings.absent
    )
    return int(any(row["wrong_tokens"] for row in rows))
