"""`kvgraft bench suite cost`: what each step of reuse costs, and when it pays."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.cli.lists import whole_numbers
from kvgraft.cli.model_options import add_model_options
from kvgraft.cli.suite_table import (
    add_journal_options,
    check_at_least,
    check_lengths,
    load_table_llm,
    measure_table,
)

if TYPE_CHECKING:
    import argparse


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the table."""
    parser = subparsers.add_parser(
        "cost",
        help="T8: what each step of reuse costs",
        description="Milliseconds per 1,000 tokens of lookup, registration, copy, rotation, computing again and "
        "publishing; bytes per token of the catalogue and of K/V; and the share of prompts that must hit for reuse to pay.",
    )
    add = parser.add_argument
    add("--lengths", type=whole_numbers, default=(1024, 4096), metavar="N,N", help="prompt lengths (default 1024,4096)")
    add("--shift", type=int, default=200, metavar="N", help="new tokens in front of a document (default 200)")
    add("--rounds", type=int, default=5, metavar="N", help="rounds per length (default 5)")
    add("--donors", type=int, default=200, metavar="N", help="other texts that are known (default 200)")
    add_journal_options(parser)
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure every step."""
    check_at_least(args, rounds=1, shift=1, donors=1)
    check_lengths(args)
    from kvgraft.bench.suite import cost

    settings = cost.CostSettings(args.lengths, args.shift, args.rounds, args.donors, args.seed)
    llm = load_table_llm(args)
    measure_table(args, cost, settings, llm, total=(len(settings.lengths) * settings.rounds, "rounds"))
    return 0
