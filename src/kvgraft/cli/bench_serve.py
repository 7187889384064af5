"""`kvgraft bench serve`: what request rate a server sustains under every reuse mode."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgraft.cli.load_report import LoadReport
from kvgraft.cli.output_files import check_output, write_whole
from kvgraft.cli.parser import show_first
from kvgraft.cli.progress import progress
from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from kvgraft.bench.serve import LoadTest, Target
    from kvgraft.bench.serve_workload import ServeWorkload
    from kvgraft.bench.summary import RunSummary

_MODES = ("off", "exact", "graft")
_MOST_GENERATED = 4_000


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "serve",
        help="request rate that a server sustains",
        description="Send the prompts of a pack to a server at several rates, earlier ones answered or not, under every "
        "reuse mode, and say which rate each mode sustains: every request ends well, requests complete at 95 % or more of "
        "the rate at which they arrive, and 95 % have their first token within the limit, counted from the time at which "
        "they were to be sent. PACK is a request pack (see 'kvgraft bench reuse --help'; arrivals follow its 't', else a "
        "Poisson process) or builtin:rag, which is made of the standard library's sources.",
    )
    parser.add_argument("pack", metavar="PACK", help="file of a pack, its path without the ending, or builtin:rag")
    add = parser.add_argument_group("server").add_argument
    add("--url", metavar="URL", help="use this running server; every run gets a cache_salt of its own")
    add("--api-key", metavar="KEY", help="key for --url (default: $OPENAI_API_KEY)")
    add(
        "--model",
        metavar="NAME",
        help="without --url: model of the server that is started per run (default graft-tiny)",
    )
    add("--server-args", default="", metavar="ARGS", help="more arguments of 'kvgraft serve', as one string")
    add = parser.add_argument_group("load").add_argument
    add("--rates", type=_rates, default=(1.0, 2.0, 4.0, 8.0), metavar="R,R", help="requests per second (1,2,4,8)")
    add(
        "--search", action="store_true", help="look for the highest sustained rate, beginning with the first of --rates"
    )
    add("--max-runs", type=int, default=8, metavar="N", help="runs per mode of --search (default 8)")
    add("--modes", type=_modes, default=("off", "exact", "graft"), metavar="M,M", help="reuse modes (off,exact,graft)")
    add("--duration", type=float, default=30.0, metavar="S", help="seconds of arrivals per run (default 30)")
    add("--requests", type=int, metavar="N", help="requests per run, instead of --duration")
    add("--max-tokens", type=int, default=32, metavar="N", help="output tokens of every request (default 32)")
    add("--warmup", type=int, default=50, metavar="N", help="requests sent before measuring, per run (default 50)")
    add("--prompt-tokens-limit", type=int, metavar="N", help="leave out longer prompts (default: what the model takes)")
    add(
        "--tokenizer",
        metavar="FILE",
        help="tokenizers JSON file that counts them (default: graft-tiny's, or an estimate)",
    )
    add("--slo-ttft-ms", type=float, metavar="X", help="limit of the p95 time to first token (default: see 'off')")
    add("--give-up-after", type=float, default=20.0, metavar="S", help="longest wait for a first token (default 20)")
    add("--seed", type=int, default=0, metavar="N")
    add = parser.add_argument_group("output").add_argument
    add("--json", metavar="FILE", help="write everything measured as JSON; - for stdout, the table then goes to stderr")
    add("--rows", action="store_true", help="with the figures of every request in the JSON")
    add("--plot", metavar="FILE.png", help="draw time to first token and per token over the rate")
    show_first(
        parser, "--url", "--model", "--rates", "--search", "--modes", "--duration", "--max-tokens", "--json", "--plot"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure; 1 if a request failed for another reason than that the server was too slow."""
    _check(args)
    from kvgraft.bench.rates import default_slo_ms, sustained_rates
    from kvgraft.bench.serve import measure_rates, search_rates

    if args.plot:
        import_module("kvgraft.bench.plot")  # a missing package is reported before measuring
    test, target = _load_test(args)
    report = LoadReport(test, sys.stderr if args.json == "-" else sys.stdout)
    report.print_head(target)

    def run_one(mode: str, rate: float) -> RunSummary:
        with progress(test.num_requests(rate), f"requests ({mode}, {rate:g}/s)") as advance:
            summary = test.run(mode, rate, advance)
        report.print_run(summary)
        return summary

    if args.search:
        runs, slo = search_rates(run_one, args.modes, args.rates[0], args.slo_ttft_ms, args.max_runs)
    else:
        runs = measure_rates(run_one, args.modes, args.rates)
        slo = args.slo_ttft_ms or default_slo_ms(runs)
    sustained = sustained_rates(runs, slo) if slo is not None else []
    report.print_result(runs, sustained, slo, is_given=args.slo_ttft_ms is not None)
    if args.json:
        settings = {name: value for name, value in vars(args).items() if name not in ("run", "api_key", "json", "plot")}
        record = report.as_dict(settings, target, runs, sustained, slo)
        _write(args.json, record if args.rows else {name: value for name, value in record.items() if name != "rows"})
    if args.plot:
        from kvgraft.bench.plot import draw_load

        title = f"{test.workload.name}, {test.server.get('id')}, {args.max_tokens} output tokens"
        draw_load(runs, slo, title, Path(args.plot))
    return int(any(summary.failures for summary in runs))


def _write(file: str, record: dict[str, object]) -> None:
    text = json.dumps(record, indent=1)
    if file == "-":
        print(text)
    else:
        write_whole(Path(file), text + "\n")


def _check(args: argparse.Namespace) -> None:
    lowest = {"requests": 1, "max_tokens": 1, "warmup": 0, "max_runs": 1, "prompt_tokens_limit": 1}
    for name, least in lowest.items():
        value = getattr(args, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}, not {value}")
    for name in ("duration", "give_up_after", "slo_ttft_ms"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0, not {value:g}")
    if args.url and (args.model or args.server_args):
        raise ConfigError("--model and --server-args are for a server that is started here; leave out --url or these")
    for name in ("json", "plot"):
        file = getattr(args, name)
        if file and file != "-":
            check_output(name, Path(file))


def _load_test(args: argparse.Namespace) -> tuple[LoadTest, Target]:
    from kvgraft.bench.serve import GivenServer, LoadSettings, LoadTest, OwnServer
    from kvgraft.bench.serve_workload import load_workload, token_counter
    from kvgraft.bench.server_process import end_on_sigterm

    per_run = args.requests or round(max(args.rates) * args.duration * (4 if args.search else 1))
    workload = load_workload(args.pack, min(args.warmup + max(per_run, 1), _MOST_GENERATED), args.seed)
    settings = LoadSettings(args.duration, args.requests, args.max_tokens, args.warmup, args.seed, args.give_up_after)
    model = args.model or "graft-tiny"
    target: Target
    if args.url:
        target = GivenServer(args.url, args.api_key or os.environ.get("OPENAI_API_KEY"))
    else:
        end_on_sigterm()
        target = OwnServer(["--model", model, *_server_args(args.server_args)])

    def fit(prompts: ServeWorkload, served: dict[str, Any]) -> ServeWorkload:
        longest = served.get("max_model_len")
        limits = [args.prompt_tokens_limit, longest - args.max_tokens if longest else None]
        limit = min((limit for limit in limits if limit is not None), default=None)
        return prompts if limit is None else prompts.no_longer_than(limit, token_counter(args.tokenizer, served["id"]))

    return LoadTest(workload, settings, target, fit), target


def _server_args(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--server-args {text!r} cannot be taken apart: {error}; close it, as in a shell") from error


def _rates(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of rates such as 1,2,4") from error
    if not all(0 < rate < float("inf") for rate in rates):
        raise argparse.ArgumentTypeError(f"{text!r}: rates are requests per second above 0")
    return rates


def _modes(text: str) -> tuple[str, ...]:
    modes = tuple(dict.fromkeys(text.split(",")))
    for mode in modes:
        if mode not in _MODES:
            raise argparse.ArgumentTypeError(f"{mode!r} is no reuse mode; choose from {','.join(_MODES)}")
    return modes
