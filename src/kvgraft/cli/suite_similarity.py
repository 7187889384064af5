"""`kvgraft bench suite similarity`: a known document that comes back edited."""

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
        "similarity",
        help="T2: documents that come back edited",
        description="Read documents of the standard library's descriptions, then ask about them behind another instruction: "
        "as they were, with 1, 5, 20 and 50 %% of their sentences replaced, reworded, and about another document. Gives what "
        "is reused beside what could be, wrong tokens, time, KL and scores. Needs no file.",
    )
    add = parser.add_argument
    add("--documents", type=int, default=6, metavar="N", help="documents per row (default 6)")
    add("--passages", type=int, default=16, metavar="N", help="descriptions per document (default 16)")
    add("--rounds", type=int, default=3, metavar="N", help="how often each prompt is timed, off and on (default 3)")
    add_clock_option(parser)
    add_journal_options(parser)
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure every edit; 1 if the K/V of a wrong token were reused."""
    check_at_least(args, documents=1, passages=2, rounds=1)
    from kvgraft.bench.suite import similarity

    settings = similarity.SimilaritySettings(
        documents=args.documents, passages=args.passages, rounds=args.rounds, clock=args.clock, seed=args.seed
    )
    llm = load_table_llm(args)
    rows = measure_table(
        args, similarity, settings, llm, total=(settings.documents * len(settings.variants), "prompts")
    )
    return int(any(row["wrong_tokens"] for row in rows))
