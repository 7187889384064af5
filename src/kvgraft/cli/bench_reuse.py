"""`kvgraft bench reuse`: how many tokens of request packs can be reused, planning only."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from kvgraft.cli.plotting import add_plot_option, check_plot, draw_plot
from kvgraft.cli.progress import progress
from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from kvgraft.bench.panels import Panel
    from kvgraft.bench.reuse import ReuseResult


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "reuse",
        help="tokens that request packs can reuse",
        description="Look up and register every prompt of the packs in order, without a model. A pack is "
        "NAME.requests.jsonl with NAME.docs.jsonl, NAME.pairs.jsonl or NAME.jsonl with an 'input' per line, possibly "
        ".gz; 'builtin', 'builtin:rag' and 'agent:KIND' need no file. 'bound' counts tokens in runs of --min-run or more "
        "that occur anywhere in an earlier prompt; 'recovered' is reused over bound, 'half' the share of requests with at "
        "least half their tokens reused.",
    )
    parser.add_argument(
        "packs",
        nargs="+",
        metavar="PACK",
        help="builtin, builtin:rag, agent:KIND, file of a pack, or its path without the ending",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="FILE",
        help="Hugging Face tokenizers JSON file (default: words in pieces of six letters)",
    )
    parser.add_argument("--min-run", type=int, default=32, metavar="N", help="shortest run that counts (default 32)")
    parser.add_argument(
        "--capacity", type=int, metavar="TOKENS", help="tokens of all donors together (default: no limit)"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON array instead of a table")
    add_plot_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure every pack; 1 if a plan would have reused a wrong token."""
    from kvgraft.bench.reuse import measure_reuse
    from kvgraft.bench.tokenization import load_tokenizer
    from kvgraft.bench.workloads import named_workloads
    from kvgraft.donors import GRAM_TOKENS

    for option, value in (("--min-run", args.min_run), ("--capacity", args.capacity)):
        if value is not None and value < GRAM_TOKENS:
            raise ConfigError(f"{option} must be at least {GRAM_TOKENS}, not {value}")
    check_plot(args)
    tokenize = load_tokenizer(args.tokenizer)
    workloads = [workload for name in args.packs for workload in named_workloads(name)]
    with progress(sum(workload.num_prompts for workload in workloads), "prompts") as advance:
        results = [
            measure_reuse(workload, tokenize, min_run=args.min_run, capacity=args.capacity, advance=advance)
            for workload in workloads
        ]
    if args.json:
        print(json.dumps([result.as_dict() for result in results], indent=1))
    else:
        _print_table(results)
    draw_plot(args, lambda: _panels(results), f"runs of {args.min_run} tokens and more, without a model")
    return int(any(result.wrong_tokens for result in results))


def _panels(results: Sequence[ReuseResult]) -> list[Panel]:
    from kvgraft.bench.panels import Bars, Series

    labels = {"exact prefix": "prefix_tokens", "reused": "reused_tokens", "bound": "bound_tokens"}
    series = [
        Series(label, [100 * getattr(result, field) / max(result.tokens, 1) for result in results])
        for label, field in labels.items()
    ]
    return [Bars("prompt tokens, %", [result.workload for result in results], series)]


def _print_table(results: Sequence[ReuseResult]) -> None:
    width = max(8, *(len(result.workload) for result in results))
    print(
        f"{'workload':{width}s}{'requests':>10s}{'tokens':>11s}{'prefix':>8s}{'reused':>8s}{'bound':>8s}{'recovered':>11s}"
        f"{'half':>8s}{'wrong':>7s}{'lookup p50':>12s}{'p99':>10s}{'register p50':>14s}"
    )
    for result in results:
        parts = (result.prefix_tokens, result.reused_tokens, result.bound_tokens)
        shares = "".join(f"{100 * part / max(result.tokens, 1):>6.1f} %" for part in parts)
        print(
            f"{result.workload:{width}s}{result.requests:>10d}{result.tokens:>11d}{shares}"
            f"{100 * result.recovered:>9.1f} %{100 * result.half_reused / max(result.requests, 1):>6.1f} %"
            f"{result.wrong_tokens:>7d}{result.lookup_ms['p50']:>9.2f} ms"
            f"{result.lookup_ms['p99']:>7.2f} ms{result.register_ms['p50']:>11.2f} ms"
        )
