"""Replay a block trace (Mooncake or Claude Code format, possibly .gz) through the prefix cache and through Belady's optimum.

    python -m benchmarks.prefix.bench_policies TRACE --policy all --capacity 2M,15M [--json] [--plot FILE.png]

Gives the share of prompt tokens that a cache of a given capacity and policy serves. Runs no model.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from benchmarks.prefix.block_traces import load_block_trace
from benchmarks.prefix.replay import OPTIMUM, replay, replay_optimum

from kvgraft.bench.panels import Bars, Series
from kvgraft.cli import run_command
from kvgraft.cli.parser import Parser
from kvgraft.cli.plotting import add_plot_option, check_plot, draw_plot
from kvgraft.cli.progress import progress
from kvgraft.errors import ConfigError
from kvgraft.prefix import EVICTION_POLICIES, make_eviction_policy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.prefix.replay import ReplayResult

    from kvgraft.bench.panels import Panel

_ALL = "all"


def build_parser() -> Parser:
    """Return the parser of the command."""
    parser = Parser(
        prog="python -m benchmarks.prefix.bench_policies",
        description="Replay a block trace (Mooncake or Claude Code format, possibly .gz) through the prefix cache, without a "
        "model, and through Belady's optimum. 'of optimum' is the share of the optimum's hits.",
    )
    parser.add_argument("trace", metavar="TRACE", help="file of the trace")
    parser.add_argument(
        "--policy",
        default="lru",
        metavar="P,P",
        help="eviction policies, or 'all' (default lru); 'optimum' is Belady's",
    )
    parser.add_argument(
        "--capacity",
        type=_capacities,
        default=(None,),
        metavar="N,N",
        help="tokens that the cache holds, with K or M if you like; 0 for no limit (default 0)",
    )
    parser.add_argument("--policy-config", default="{}", metavar="JSON", help="parameters of a single policy")
    parser.add_argument("--json", action="store_true", help="print a JSON array instead of a table")
    add_plot_option(parser)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Replay the trace once per capacity and policy."""
    check_plot(args)
    policies = [*sorted(EVICTION_POLICIES), OPTIMUM] if args.policy == _ALL else args.policy.split(",")
    config = _policy_config(args.policy_config)
    if config and len(policies) > 1:
        raise ConfigError("--policy-config goes with a single --policy")
    for policy in policies:
        if policy != OPTIMUM:
            make_eviction_policy(policy, config)
    trace = load_block_trace(args.trace)
    results = []
    with progress(len(policies) * len(args.capacity), "replays") as advance:
        for capacity in args.capacity:
            for policy in policies:
                if policy == OPTIMUM:
                    results.append(replay_optimum(trace, capacity))
                else:
                    results.append(replay(trace, policy, capacity, policy_config=config))
                advance()
    if args.json:
        print(json.dumps([_as_dict(result) for result in results], indent=1))
    else:
        _print_table(results)
    draw_plot(args, lambda: _panels(results), args.trace)
    return 0


def _panels(results: Sequence[ReplayResult]) -> list[Panel]:
    capacities = list(dict.fromkeys(result.capacity for result in results))
    known = {(result.capacity, result.policy): 100 * result.hit_rate for result in results}
    series = [
        Series(policy, [known.get((capacity, policy)) for capacity in capacities])
        for policy in dict.fromkeys(result.policy for result in results)
    ]
    names = ["no limit" if capacity is None else f"{capacity:,} tokens" for capacity in capacities]
    return [Bars("prompt tokens served from the cache, %", names, series)]


def _policy_config(text: str) -> dict[str, int]:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--policy-config is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError('--policy-config must be an object such as {"protected_threshold": 2}')
    return config


def _capacities(text: str) -> tuple[int | None, ...]:
    return tuple(_capacity(part) for part in text.split(","))


def _capacity(text: str) -> int | None:
    factor = {"K": 1_000, "M": 1_000_000}.get(text[-1:].upper(), 1)
    try:
        tokens = int(float(text if factor == 1 else text[:-1]) * factor)
    except (ValueError, OverflowError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens such as 500000, 500K or 0.5M") from error
    if tokens < 0:
        raise argparse.ArgumentTypeError("a capacity must be at least 0, which stands for no limit")
    return tokens or None


def _as_dict(result: ReplayResult) -> dict[str, object]:
    return {
        "trace": result.trace,
        "policy": result.policy,
        "capacity": result.capacity,
        "num_tokens": result.num_tokens,
        "hit_tokens": result.hit_tokens,
        "hit_rate": round(result.hit_rate, 5),
        "us_per_request": round(result.us_per_request, 1),
    }


def _print_table(results: Sequence[ReplayResult]) -> None:
    best = {result.capacity: result.hit_tokens for result in results if result.policy == OPTIMUM}
    print(
        f"{'capacity':>12s}{'policy':>10s}{'hit tokens':>14s}{'hit rate':>10s}{'of optimum':>12s}{'per request':>14s}"
    )
    for result in results:
        capacity = "no limit" if result.capacity is None else str(result.capacity)
        optimum = best.get(result.capacity)
        share = f"{result.hit_tokens / optimum:>11.1%}" if optimum else f"{'':>11s}"
        print(
            f"{capacity:>12s}{result.policy:>10s}{result.hit_tokens:>14d}{result.hit_rate:>10.2%} {share}"
            f"{result.us_per_request:>11.1f} us"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    return run_command(build_parser, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
