"""`kvgraft bench serve`: what servers do under load, reuse modes of one or several beside each other."""

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
    from collections.abc import Sequence

    from kvgraft.bench.arrivals import Load
    from kvgraft.bench.serve import LoadTest, Side
    from kvgraft.bench.serve_workload import ServeWorkload
    from kvgraft.bench.summary import RunSummary

_MODES = ("off", "exact", "graft")
_MOST_GENERATED = 4_000


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "serve",
        help="what servers do under load, and the request rate that each sustains",
        description="Send the prompts of a pack to a server at several rates, earlier ones answered or not, under every "
        "reuse mode, and say which rate each mode sustains: every request ends well, requests complete at 95 % or more of "
        "the rate at which they arrive, and 95 % have their first token within the limit, counted from the time at which "
        "they were to be sent. With --clients requests come from so many clients, each with one at a time. With several "
        "servers (--url NAME=URL) these are compared as they are set up, in turns; their greedy answers are compared "
        "first. PACK is a request pack (see 'kvgraft bench reuse --help'; arrivals follow its 't', else a "
        "Poisson process) or builtin:rag, which is made of the standard library's sources.",
    )
    parser.add_argument("pack", metavar="PACK", help="file of a pack, its path without the ending, or builtin:rag")
    add = parser.add_argument_group("server").add_argument
    add(
        "--url",
        action="append",
        type=_named_url,
        default=[],
        metavar="[NAME=]URL",
        help="use this running server, vLLM's or SGLang's too; every run gets a cache_salt of its own; with NAME, as it is "
        "set up, beside others (the one that is named off gives the limit)",
    )
    add("--api-key", metavar="KEY", help="key for --url (default: $OPENAI_API_KEY)")
    add(
        "--model",
        metavar="NAME",
        help="model of the server that is started per run where no --url is given (default graft-tiny)",
    )
    add("--server-args", default="", metavar="ARGS", help="more arguments of 'kvgraft serve', as one string")
    add = parser.add_argument_group("load").add_argument
    add("--rates", type=_rates, default=(1.0, 2.0, 4.0, 8.0), metavar="R,R", help="requests per second (1,2,4,8)")
    add(
        "--clients", type=_clients, metavar="C,C", help="so many clients with one request at a time, instead of --rates"
    )
    add(
        "--check",
        type=int,
        default=8,
        metavar="N",
        help="answers of each named server that are compared with the first one's before measuring (default 8)",
    )
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
        parser,
        "--url",
        "--model",
        "--rates",
        "--clients",
        "--search",
        "--modes",
        "--duration",
        "--max-tokens",
        "--json",
        "--plot",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure; 1 if a request failed for another reason than that the server was too slow."""
    _check(args)
    from kvgraft.bench.arrivals import Load
    from kvgraft.bench.rates import default_slo_ms, sustained_rates
    from kvgraft.bench.serve import check_answers, measure_loads, search_rates

    if args.plot:
        import_module("kvgraft.bench.plot")  # a missing package is reported before measuring
    test = _load_test(args)
    report = LoadReport(test, sys.stderr if args.json == "-" else sys.stdout)
    checks = check_answers(test, args.check) if args.check and _is_named(args.url) else {}
    report.print_head(checks)

    def run_one(side: str, load: Load) -> RunSummary:
        with progress(test.num_requests(load), f"requests ({side}, {load})") as advance:
            summary = test.run(side, load, advance)
        report.print_run(summary)
        return summary

    sides = list(test.sides)
    if args.search:
        runs, slo = search_rates(
            lambda side, rate: run_one(side, Load(rate=rate)), sides, args.rates[0], args.slo_ttft_ms, args.max_runs
        )
    else:
        loads = [Load(clients=c) for c in args.clients or ()] or [Load(rate=rate) for rate in args.rates]
        runs = measure_loads(run_one, sides, loads)
        slo = args.slo_ttft_ms or default_slo_ms(runs)
    sustained = sustained_rates(runs, slo) if slo is not None and not args.clients else []
    report.print_result(runs, sustained, slo, is_given=args.slo_ttft_ms is not None)
    if args.json:
        settings = {name: value for name, value in vars(args).items() if name not in ("run", "api_key", "json", "plot")}
        record = report.as_dict(settings, checks, runs, sustained, slo)
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
    lowest = {"requests": 1, "max_tokens": 1, "warmup": 0, "max_runs": 1, "prompt_tokens_limit": 1, "check": 0}
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
    _check_sides(args.url)
    if args.clients and args.search:
        raise ConfigError("--search looks for a rate; leave it out, or --clients")
    for name in ("json", "plot"):
        file = getattr(args, name)
        if file and file != "-":
            check_output(name, Path(file))


def _check_sides(urls: Sequence[tuple[str, str]]) -> None:
    names = [name for name, _ in urls]
    if len(names) > 1 and not all(names):
        raise ConfigError("several servers need names: --url off=URL --url kvgraft=URL")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise ConfigError(f"two servers are named {twice!r}; name them differently")


def _is_named(urls: Sequence[tuple[str, str]]) -> bool:
    return any(name for name, _ in urls)


def _load_test(args: argparse.Namespace) -> LoadTest:
    from kvgraft.bench.serve import CLOSED_LOOP_REQUESTS, LoadSettings, LoadTest
    from kvgraft.bench.serve_workload import load_workload, token_counter

    by_rate = round(max(args.rates) * args.duration * (4 if args.search else 1))
    per_run = args.requests or (CLOSED_LOOP_REQUESTS if args.clients else by_rate)
    workload = load_workload(args.pack, min(args.warmup + max(per_run, 1), _MOST_GENERATED), args.seed)
    settings = LoadSettings(args.duration, args.requests, args.max_tokens, args.warmup, args.seed, args.give_up_after)

    def fit(prompts: ServeWorkload, served: dict[str, Any]) -> ServeWorkload:
        longest = served.get("max_model_len")
        limits = [args.prompt_tokens_limit, longest - args.max_tokens if longest else None]
        limit = min((limit for limit in limits if limit is not None), default=None)
        return prompts if limit is None else prompts.no_longer_than(limit, token_counter(args.tokenizer, served["id"]))

    return LoadTest(workload, settings, _sides(args), fit)


def _sides(args: argparse.Namespace) -> dict[str, Side]:
    """Return what is compared: the servers that are named, or the reuse modes of one server."""
    from kvgraft.bench.serve import GivenServer, OwnServer, Side, Target
    from kvgraft.bench.server_process import end_on_sigterm

    api_key = args.api_key or os.environ.get("OPENAI_API_KEY")
    if _is_named(args.url):
        return {name: Side(GivenServer(url, api_key)) for name, url in args.url}
    target: Target
    if args.url:
        target = GivenServer(args.url[0][1], api_key)
    else:
        end_on_sigterm()
        target = OwnServer(["--model", args.model or "graft-tiny", *_server_args(args.server_args)])
    return {mode: Side(target, mode) for mode in args.modes}


def _server_args(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--server-args {text!r} cannot be taken apart: {error}; close it, as in a shell") from error


def _named_url(text: str) -> tuple[str, str]:
    """Return name and address of `NAME=URL`; an empty name where there is none."""
    name, is_given, url = text.partition("=")
    if not is_given or "/" in name or ":" in name:
        return "", text
    if not name or not url:
        raise argparse.ArgumentTypeError(f"{text!r} is neither URL nor NAME=URL")
    return name, url


def _clients(text: str) -> tuple[int, ...]:
    counts = text.split(",")
    if not all(count.isdecimal() and int(count) for count in counts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of clients such as 1,4,16")
    return tuple(map(int, counts))


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
