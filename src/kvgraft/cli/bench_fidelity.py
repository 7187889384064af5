"""`kvgraft bench fidelity`: how far answers from reused K/V are from full prefill, on suites with documents and answers."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgraft.cli.fidelity_report import print_controls, print_rows, print_sample
from kvgraft.cli.model_options import add_model_options, engine_config, load_llm
from kvgraft.cli.output_files import check_output, write_whole
from kvgraft.cli.parser import show_first
from kvgraft.cli.progress import progress
from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from kvgraft.bench.fidelity.run import SuitePlan
    from kvgraft.bench.fidelity.settings import Setting
    from kvgraft.bench.journal import Journal
    from kvgraft.engine import LLM

_DATA = "packs"
_SPLITS = ("dev", "test", "all")


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "fidelity",
        help="error of reuse against full prefill",
        description="Measure requests of every suite under every setting against the model's own full prefill of the same "
        "prompt. A suite is 'builtin', the name of a pack in --data (rag, xinstr, lines, tools, adversarial, ...) or its "
        "path. A policy is NAME[:RATIO][+CORRECTION][@TIME[~MARGIN][:ROWS]], or 'default', the engine's; TIME is before or "
        "after. docs/fidelity.md says what figures mean.",
    )
    add = parser.add_argument
    add("suites", nargs="+", metavar="SUITE", help="what is asked")
    add("--data", default=_DATA, metavar="DIR", help=f"where packs lie (default {_DATA})")
    add("--policy", nargs="+", action="extend", metavar="P", help="what is compared (default: none default)")
    add("--budget", nargs="+", action="extend", type=float, metavar="R", help="ratios of policies that take one")
    add("--limit", type=int, default=24, metavar="N", help="requests per suite (default 24)")
    add("--split", choices=_SPLITS, default="dev", help="half of the documents: tune on dev, report test (default dev)")
    add("--seed", type=int, default=0, metavar="N", help="chooses the sample and the resampling (default 0)")
    add("--max-prompt-tokens", type=int, default=2048, metavar="N", help="longer prompts are skipped (default 2048)")
    add("--noise-floor", type=int, default=4, metavar="N", help="requests per suite that get controls (default 4)")
    add(
        "--json",
        metavar="F",
        help="write meta and rows; requests go to F with .requests.jsonl, from where a run goes on",
    )
    add("--plot", metavar="F", help="write a PNG of error against computed operations")
    add_model_options(parser)
    show_first(parser, "--data", "--policy", "--limit", "--split", "--json", "--plot", "--model", "--config")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure every suite; 1 if a control says that the instrument is off."""
    _check(args)
    if args.plot:
        import_module("kvgraft.bench.fidelity.plot")  # a missing package is reported before measuring
    from kvgraft.bench.fidelity.one_space import in_one_space
    from kvgraft.bench.fidelity.run import SuiteRunner, plan_suite
    from kvgraft.bench.fidelity.settings import default_setting, parse_settings
    from kvgraft.bench.fidelity.subject import Subject
    from kvgraft.bench.fidelity.suites import load_suites
    from kvgraft.bench.journal import Journal

    suites = load_suites(args.suites, args.data)
    config = engine_config(args)
    llm = load_llm(in_one_space(config), shows_stages=not args.json)
    settings = parse_settings(args.policy or ["none", "default"], args.budget or [], default_setting(llm))
    if llm.graft_refusal is not None:
        raise ConfigError(f"K/V of model {llm.loaded.name} cannot be moved ({llm.graft_refusal}); choose another model")
    subject = Subject(llm, args.max_prompt_tokens)
    plans = [plan_suite(suite, subject, side=args.split, limit=args.limit, seed=args.seed) for suite in suites]
    file = None if args.json is None else Path(args.json)
    journal = Journal(None if file is None else requests_file(file), _arguments(args, llm, settings))
    print_sample(plans, len(journal), subject.longest)
    runner = SuiteRunner(llm, subject, settings, num_controls=args.noise_floor, seed=args.seed)
    with progress(sum(len(plan.sample.indices) for plan in plans), "requests") as advance:
        for plan in plans:
            runner.run(plan, journal, advance)
    return _report(args, _meta(args, llm, plans, runner.noise_dtype), journal, plans, settings)


def requests_file(file: Path) -> Path:
    """Return the path of the records of requests, beside the JSON file."""
    return file.with_suffix(".requests.jsonl")


def _report(
    args: argparse.Namespace,
    meta: dict[str, Any],
    journal: Journal,
    plans: Sequence[SuitePlan],
    settings: Sequence[Setting],
) -> int:
    from kvgraft.bench.fidelity.rows import control_rows, failed_controls, summary_rows

    records = [record for plan in plans for record in journal.under(plan.suite.name)]
    rows, controls = summary_rows(records, settings, args.seed), control_rows(records)
    print_rows(rows)
    print_controls(controls)
    if args.json:
        text = json.dumps({"meta": meta, "rows": rows, "controls": controls}, indent=1)
        write_whole(Path(args.json), text + "\n")
    if args.plot:
        from kvgraft.bench.fidelity.plot import draw_fidelity

        noise = [row["mean_kl"] for row in controls if row["control"] == "noise"]
        title = f"{meta['model']}, {meta['dtype']}, {args.split}"
        draw_fidelity(rows, sum(noise) / len(noise) if noise else None, title, Path(args.plot))
    failed = failed_controls(controls)
    for line in failed:
        print(f"kvgraft: {line}; do not trust these figures", file=sys.stderr)
    return int(bool(failed))


def _arguments(args: argparse.Namespace, llm: LLM, settings: Sequence[Setting]) -> dict[str, Any]:
    """Return the arguments that the figures of a request depend on; a run goes on only with the same."""
    from kvgraft import __version__
    from kvgraft.bench.fidelity.meta import commit

    names = ("suites", "data", "limit", "split", "seed", "max_prompt_tokens", "noise_floor")
    return {name: getattr(args, name) for name in names} | {
        "policies": [setting.label for setting in settings],
        "fingerprint": llm.loaded.fingerprint,
        "num_slots": llm.usage().total,
        "code": commit() or __version__,
    }


def _meta(args: argparse.Namespace, llm: LLM, plans: Sequence[SuitePlan], noise: str) -> dict[str, Any]:
    from kvgraft.bench.fidelity.measure import CONTINUATION_TOKENS
    from kvgraft.bench.fidelity.meta import environment

    return environment() | {
        "command": " ".join(["kvgraft bench fidelity", *args.suites]),
        "arguments": {name: value for name, value in vars(args).items() if name != "run"},
        "model": llm.loaded.name,
        "fingerprint": llm.loaded.fingerprint,
        "dtype": str(next(llm.adapter.model.parameters()).dtype).removeprefix("torch."),
        "noise_dtype": noise,
        "seed": args.seed,
        "split": args.split,
        "continuation_tokens": CONTINUATION_TOKENS,
        "samples": {
            plan.suite.name: {"requests": len(plan.sample.indices), "too_long": plan.sample.too_long} for plan in plans
        },
    }


def _check(args: argparse.Namespace) -> None:
    lowest = {"limit": 1, "max_prompt_tokens": 1, "noise_floor": 0}
    for name, least in lowest.items():
        if getattr(args, name) < least:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}, not {getattr(args, name)}")
    for name in ("json", "plot"):
        file = getattr(args, name)
        if file is not None:
            check_output(name, Path(file))
