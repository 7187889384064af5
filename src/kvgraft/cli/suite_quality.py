"""`kvgraft bench suite quality`: the perplexity ratio, and what it hides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.cli.model_options import add_model_options
from kvgraft.cli.suite_table import add_sample_options, check_at_least, load_table_llm, measure_table

if TYPE_CHECKING:
    import argparse


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the table."""
    parser = subparsers.add_parser(
        "quality",
        help="T6: the perplexity ratio, and what it hides",
        description="Answer the same requests with nothing reused, in another number format, with exact prefixes, under "
        "every policy, verified, and from the K/V of a similar text; give the perplexity of each method's own output "
        "beside KL, first flips, scores and stale answers. Packs that are not in --data are left out and named.",
    )
    add = parser.add_argument
    add("--suites", nargs="+", metavar="SUITE", help="builtin and packs (default: builtin rag adversarial lines tools)")
    add("--policy", nargs="+", metavar="P", help="NAME[:RATIO][+CORRECTION] or default (default: every policy)")
    add_sample_options(parser, max_prompt_tokens=4608)
    add(
        "--noise-floor",
        type=int,
        default=4,
        metavar="N",
        help="requests per suite in another number format (default 4)",
    )
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure every suite that is there."""
    check_at_least(args, limit=1, max_prompt_tokens=1, noise_floor=0)
    from kvgraft.bench.suite import quality

    settings = quality.QualitySettings(
        suites=tuple(args.suites or quality.SUITES),
        data=args.data,
        policies=tuple(args.policy or quality.POLICIES),
        limit=args.limit,
        noise_floor=args.noise_floor,
        max_prompt_tokens=args.max_prompt_tokens,
        seed=args.seed,
    )
    llm = load_table_llm(args)
    measure_table(
        args, quality, settings, llm, total=(len(settings.present) * args.limit, "requests"), absent=settings.absent
    )
    return 0
