"""`kvgraft bench ttft`: answers about a shifted document, cold, with exact prefixes and grafted: when their tokens come."""

from __future__ import annotations

import dataclasses
import json
import statistics
from typing import TYPE_CHECKING

from kvgraft.cli.lists import whole_numbers
from kvgraft.cli.model_options import add_model_options, engine_config, load_llm
from kvgraft.cli.parser import show_first
from kvgraft.cli.plotting import add_plot_option, check_plot, draw_plot
from kvgraft.cli.progress import progress
from kvgraft.cli.watching import trace_file
from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from kvgraft.bench.panels import Panel
    from kvgraft.bench.ttft import TtftResult
    from kvgraft.engine import LLM


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "ttft",
        help="time to first token of a document after a new beginning",
        description="For each length: a prompt of --shift new tokens and a document that was read before at position 0. "
        "Times are medians of --repeat interleaved rounds: to the first token, and of grafts the gap to the second token, "
        "which waits for a repair after the first, and the time of all --tokens. flop_bound is what full prefill costs over "
        "what the computed positions cost.",
    )
    add = parser.add_argument
    add(
        "--lengths",
        type=whole_numbers,
        default=(1024, 4096, 8192),
        metavar="N,N",
        help="prompt lengths (1024,4096,8192)",
    )
    add("--shift", type=int, default=200, metavar="N", help="new tokens before the document (default 200)")
    add("--tokens", type=int, default=8, metavar="N", help="of each answer (default 8; 1 is repaired before it)")
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="rounds per length (default 5)")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--json", action="store_true", help="print a JSON array instead of a table")
    add_plot_option(parser)
    add_model_options(parser, "trace_out")
    show_first(parser, "--lengths", "--shift", "--tokens", "--repeat", "--json", "--plot", "--model", "--config")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure every length."""
    if min(args.repeat, args.shift, args.tokens) < 1:
        raise ConfigError("--repeat, --shift and --tokens must be at least 1")
    if min(args.lengths) < args.shift + 64:
        raise ConfigError(f"--lengths must be at least --shift + 64 = {args.shift + 64}")
    check_plot(args)
    config = engine_config(args)
    with trace_file(config) as trace:
        llm = load_llm(config, shows_stages=not args.json, recorder=trace)
        results = _measured(llm, args)
    if args.json:
        print(json.dumps([dataclasses.asdict(result) for result in results], indent=1))
    else:
        _print_table(results)
    draw_plot(args, lambda: _panels(results), f"{llm.loaded.name}, a known document after {args.shift} new tokens")
    return 0


def _panels(results: Sequence[TtftResult]) -> list[Panel]:
    from kvgraft.bench.panels import Bars, Lines, Series

    labels = {
        "reuse off": "cold_s",
        "exact prefixes": "prefix_s",
        "grafted": "graft_s",
        "exact hit, as many new tokens": "hit_s",
        "same prompt again": "repeat_s",
    }
    rows = [dataclasses.asdict(result) for result in results]
    lengths = [result.length for result in results]
    times = [Series.of(label, rows, field, 1e3) for label, field in labels.items()]
    reached = [Series.of("grafted", rows, "achieved_over_bound", 100)]
    return [
        Lines("time to first token, ms", "prompt tokens", lengths, times, is_log=True),
        Bars("speed-up, % of the FLOP bound", [f"{length:,}" for length in lengths], reached, mark=100),
    ]


def _measured(llm: LLM, args: argparse.Namespace) -> list[TtftResult]:
    from kvgraft.bench.ttft import RoundShape, measure_ttft
    from kvgraft.engine import SamplingParams

    sampling = SamplingParams(args.tokens, ignore_eos=True)
    with progress(len(args.lengths) * args.repeat, "rounds") as advance:
        return [
            measure_ttft(
                llm, RoundShape(length, args.shift, sampling), repeat=args.repeat, seed=args.seed, advance=advance
            )
            for length in args.lengths
        ]


def _print_table(results: Sequence[TtftResult]) -> None:
    columns = (
        "length",
        "cold",
        "exact",
        "hit",
        "graft",
        "2nd after",
        "total",
        "computed",
        "speed-up",
        "bound",
        "reached",
    )
    print("".join(f"{column:>10s}" for column in (*columns, "miss cost")))
    for r in results:
        shown = (r.cold_s, r.prefix_s, r.hit_s, r.graft_s, r.graft_second_gap_s, r.graft_total_s)
        times = "".join(f"{seconds * 1e3:>7.0f} ms" for seconds in shown)
        ratios = f"{r.speedup:>9.1f}x{r.flop_bound:>9.1f}x{r.achieved_over_bound:>10.0%}{r.miss_overhead:>+10.2%}"
        print(f"{r.length:>10d}{times}{r.computed_tokens:>10d}{ratios}")
    print(f"\nmedian share of the bound: {statistics.median(r.achieved_over_bound for r in results):.0%}")
