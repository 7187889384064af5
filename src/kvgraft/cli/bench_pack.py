"""`kvgraft bench pack`: make request packs, and count what can be reused of them turn by turn."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvgraft.cli import bench_pack_dataset
from kvgraft.cli.output_files import write_whole
from kvgraft.cli.plotting import add_plot_option, check_plot, draw_plot
from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from kvgraft.bench.agents import AgentPrompt, AgentSettings
    from kvgraft.bench.panels import Panel

_ALL = "all"


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "pack",
        help="make request packs of agents, or of a public data set's files",
        description="Make request packs that other benchmarks read.",
    )
    makers = parser.add_subparsers(title="packs", metavar="PACK", required=True)
    agent = makers.add_parser(
        "agent",
        help="a scripted coding agent whose prompts change from turn to turn",
        description="Write agent_KIND.jsonl per kind: a coding agent over the standard library's sources, whose prompts "
        "differ from turn to turn as those of real ones do: growing (nothing but that), clock, compaction, stripped "
        "(reasoning), reorder (of tools and files), subagents, edit (of a file), switch (of the system prompt).",
    )
    add = agent.add_argument
    add("kinds", nargs="+", metavar="KIND", help="kinds, or 'all'")
    add("--output", metavar="DIR", help="folder of the packs; without it tokens per turn are counted")
    add("--turns", type=int, default=40, metavar="N", help="turns of a session (default 40)")
    add("--sessions", type=int, default=1, metavar="N", help="sessions, in turns (default 1)")
    add("--files", type=int, default=4, metavar="N", help="files in every context (default 4)")
    add(
        "--max-characters",
        type=int,
        default=24_000,
        metavar="N",
        help="sessions end where a prompt would be longer; about 3 are a token (default 24000)",
    )
    add("--seed", type=int, default=0, metavar="N")
    add(
        "--tokenizer",
        metavar="FILE",
        help="Hugging Face tokenizers JSON file to count with (default: words in pieces of six letters)",
    )
    add("--min-run", type=int, default=32, metavar="N", help="shortest run that counts (default 32)")
    add("--json", action="store_true", help="print the counts of every turn as JSON")
    add_plot_option(agent)
    agent.set_defaults(run=run)
    bench_pack_dataset.register(makers)


def run(args: argparse.Namespace) -> int:
    """Make the packs; with no folder, or with `--json` or `--plot`, count."""
    from kvgraft.bench.agents import AGENT_KINDS, AgentSettings, agent_prompts

    check_plot(args)
    settings = AgentSettings(args.turns, args.sessions, args.files, args.max_characters, args.seed)
    kinds = list(AGENT_KINDS) if _ALL in args.kinds else list(dict.fromkeys(args.kinds))
    made = {kind: agent_prompts(kind, settings) for kind in kinds}
    if args.output is not None:
        for kind, prompts in made.items():
            path = _write(Path(args.output), kind, prompts)
            print(f"{path}: {len(prompts)} prompts", file=sys.stderr)
    if args.json or args.plot or args.output is None:
        counted = _counted(args, made)
        _print(args, counted, settings)
        draw_plot(args, lambda: _panels(counted), f"runs of {args.min_run} tokens and more, without a model")
    return 0


def _write(folder: Path, kind: str, prompts: Sequence[AgentPrompt]) -> Path:
    path = folder / f"agent_{kind}.jsonl"
    lines = [
        json.dumps({"input": prompt.text, "session_id": f"{kind} {prompt.session}", "turn": prompt.turn})
        for prompt in prompts
    ]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, "\n".join(lines) + "\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}); give another folder for --output") from error
    return path


def _counted(args: argparse.Namespace, made: dict[str, list[AgentPrompt]]) -> dict[str, list[dict[str, int]]]:
    """Count tokens of every turn by kind: of the prompt, in an exact prefix, reused, and reusable at any offset."""
    from kvgraft.bench.packs import PackSession, Workload
    from kvgraft.bench.reuse import measure_reuse
    from kvgraft.bench.tokenization import load_tokenizer

    tokenize = load_tokenizer(args.tokenizer)
    counted = {}
    for kind, prompts in made.items():
        workload = Workload(kind, (PackSession((), tuple(prompt.text for prompt in prompts)),))
        found = measure_reuse(workload, tokenize, min_run=args.min_run)
        counted[kind] = [
            {
                "session": prompt.session,
                "turn": prompt.turn,
                "tokens": each.tokens,
                "prefix": each.prefix_tokens,
                "reused": each.reused_tokens,
                "bound": each.bound_tokens,
            }
            for prompt, each in zip(prompts, found.prompts, strict=True)
        ]
    return counted


def _panels(counted: Mapping[str, Sequence[Mapping[str, int]]]) -> list[Panel]:
    from kvgraft.bench.panels import Lines, Series

    # What lies within another comes later, so that it is seen where both are equal.
    labels = {"prompt": "tokens", "bound": "bound", "reused": "reused", "exact prefix": "prefix"}
    return [
        Lines(
            f"{kind}: tokens",
            "prompt",
            range(1, len(turns) + 1),
            [Series(label, [turn[name] for turn in turns]) for label, name in labels.items()],
        )
        for kind, turns in counted.items()
    ]


def _print(
    args: argparse.Namespace, counted: Mapping[str, Sequence[Mapping[str, int]]], settings: AgentSettings
) -> None:
    if args.json:
        print(json.dumps({"seed": settings.seed, "min_run": args.min_run, "turns": counted}, indent=1))
        return
    print(f"{'kind':12s}{'turn':>6s}{'tokens':>9s}{'prefix':>9s}{'reused':>9s}{'bound':>9s}")
    for kind, turns in counted.items():
        for turn in turns:
            counts = "".join(f"{turn[name]:>9d}" for name in ("tokens", "prefix", "reused", "bound"))
            print(f"{kind:12s}{turn['turn']:>6d}{counts}")
