"""`kvgraft bench suite length`: time to first token by length."""

from __future__ import annotations

import dataclasses
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
from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    import argparse

    from kvgraft.bench.suite.length import LengthSettings
    from kvgraft.engine import LLM


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the table."""
    parser = subparsers.add_parser(
        "length",
        help="T1: time to first token by length",
        description="For each length, in turns: nothing known and reuse off (cold), nothing known and reuse on (miss), the "
        "document known at another position, with nothing computed again (none) and as the engine does by default "
        "(default), and the very same prompt again (repeat), which bounds what reuse can reach.",
    )
    add = parser.add_argument
    add(
        "--lengths",
        type=whole_numbers,
        default=(1024, 2048, 4096, 8000),
        metavar="N,N",
        help="prompt lengths (default 1024,2048,4096,8000)",
    )
    add("--shift", type=int, default=200, metavar="N", help="new tokens in front of the document (default 200)")
    add("--rounds", type=int, default=3, metavar="N", help="rounds per length (default 3)")
    add(
        "--random-context",
        type=int,
        default=0,
        metavar="N",
        help="take random weights of the model's shape and a context of N tokens: for lengths beyond the model's",
    )
    add_journal_options(parser)
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure every length."""
    check_at_least(args, rounds=1, shift=1, random_context=0)
    check_lengths(args)
    from kvgraft.bench.suite import length

    settings = length.LengthSettings(args.lengths, args.shift, args.rounds, args.seed, args.random_context)
    llm = _llm(args, settings)
    measure_table(args, length, settings, llm, total=(len(settings.lengths) * settings.rounds, "rounds"))
    return 0


def _llm(args: argparse.Namespace, settings: LengthSettings) -> LLM:
    """The model, or what stands in for it.

    Raises:
        ConfigError: A prompt is too long for it.
    """
    llm = load_table_llm(args)
    if settings.random_context:
        from kvgraft.bench.suite.random_weights import lengthened
        from kvgraft.engine import LLM

        loaded = lengthened(llm.loaded, settings.random_context, settings.seed)
        # Slots of a document, of a prompt that has it and of another one.
        config = dataclasses.replace(llm.config, num_slots=3 * max(settings.lengths) + settings.shift, max_model_len=0)
        llm.close()
        llm = LLM(loaded, config)
    longest = max(settings.lengths)
    if longest >= llm.max_model_len:
        raise ConfigError(
            f"--lengths has {longest}, and {llm.loaded.name} takes {llm.max_model_len} tokens; give shorter ones, a larger "
            "--num-slots, or --random-context for a model with random weights"
        )
    return llm
