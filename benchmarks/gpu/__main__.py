"""All that one wants to know of a card, in one command, without a network: `python -m benchmarks.gpu` (`make bench-gpu`)."""

from __future__ import annotations

import json
import logging
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvgraft.cli import run_command
from kvgraft.cli.lists import whole_numbers
from kvgraft.cli.model_options import silence_libraries
from kvgraft.cli.output_files import check_output
from kvgraft.cli.parser import Parser
from kvgraft.errors import ConfigError
from kvgraft.integrations.vllm.worker.text_reader import text_reader

from . import run as parts
from .exactness import ExactnessSizes
from .run import GpuSettings

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence


def build_parser() -> Parser:
    """Return the parser."""
    parser = Parser(
        prog="python -m benchmarks.gpu",
        description="Self-check and exactness against the model's own forward pass, first tokens by length, decode steps "
        "beside repair, copies and captures, for FlexAttention and SDPA. Needs no network. Random weights of Llama 8B's "
        "shape, and SmolLM2 where it is installed. The file is written as it goes; what there is no time or memory for is "
        "named in it. Exit code 1 if something failed or differs.",
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("bench-gpu.json"), metavar="FILE", help="default bench-gpu.json")
    add("--minutes", type=float, default=10.0, metavar="N", help="for everything (default 10)")
    add("--lengths", type=whole_numbers, metavar="N,N", help="prompt lengths (1024 to 32768)")
    add("--decode-lengths", type=whole_numbers, metavar="N,N", help="of decoding sequences (1024,8192,32768)")
    add("--models", metavar="NAME,NAME", help="llama-8b, llama-toy (random weights), or as --model of other commands")
    add("--rounds", type=int, default=5, metavar="N", help="of each measurement (default 5)")
    add("--prompt", type=int, default=1500, metavar="N", help="tokens of prompts that are compared (default 1500)")
    add("--device", default="cuda", help="cuda, cuda:N, or cpu to try the command itself (default cuda)")
    add("--seed", type=int, default=0, metavar="N")
    add("--json", action="store_true", help="print the JSON instead of tables")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure, print, and say whether all went well."""
    if not 0 < args.minutes < math.inf or args.rounds < 1:
        raise ConfigError("--minutes must be a number above 0, and --rounds at least 1")
    check_output("out", args.out)
    settings = GpuSettings(
        minutes=args.minutes,
        rounds=args.rounds,
        exactness=ExactnessSizes(args.prompt, shift=max(1, args.prompt // 8)),
        seed=args.seed,
    )
    given = {"lengths": args.lengths, "decode_lengths": args.decode_lengths}
    given["models"] = tuple(args.models.split(",")) if args.models else None
    settings = replace(settings, **{name: value for name, value in given.items() if value})
    shortest = min(settings.lengths)
    settings = replace(settings, shift=min(settings.shift, shortest // 4))
    if settings.shift < 1 or args.prompt < 256 or shortest < 256:
        raise ConfigError("--lengths and --prompt must be at least 256")
    device = _device(args.device)
    silence_libraries()
    logging.getLogger("kvgraft").setLevel(logging.ERROR)
    found = parts.measure_gpu(
        settings, device, text_reader, file=args.out, show=lambda part: print(_line(part), file=sys.stderr, flush=True)
    )
    print(json.dumps(found, indent=1) if args.json else "\n".join(_report(found, args.out)))
    outcome = found["verdict"]
    return 1 if outcome["failed"] or outcome["is_exact"] is False else 0


def _device(name: str) -> torch.device:
    """Return the device.

    Raises:
        ConfigError: It is not there.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name} is no device; give cuda, cuda:N or cpu") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("torch sees no GPU; install a CUDA build of it, or try the command with --device cpu")
    return device


def _line(part: dict[str, Any]) -> str:
    """Return what has become of a part."""
    name = f"{part['model']} {part['dtype']} {part['attention']} {part['part']}"
    outcome = next((f"{word}: {part[word]}" for word in ("failed", "skipped") if word in part), "")
    return f"{name}: {outcome or 'done'}" + (f" in {part['seconds']:.1f} s" if "seconds" in part else "")


def _report(found: dict[str, Any], file: Path) -> Iterator[str]:
    """Yield the lines that a person reads."""
    card, outcome = found["card"], found["verdict"]
    rates = ", ".join(
        f"{name.removesuffix('_gb_s').replace('_', ' ')} {card[name]:.0f}" for name in card if "gb_s" in name
    )
    yield f"{card['name']}; copies in GB/s: {rates}"
    for part in found["parts"]:
        yield ""
        yield _line(part)
        yield from _TABLES[part["part"]](part["result"]) if "result" in part else ()
        for length, reason in part.get("result", {}).get("skipped", {}).items():
            yield f"  {length} tokens: {reason}"
    exact = {True: "yes", False: "NO", None: "not compared"}[outcome["is_exact"]]
    yield ""
    yield f"exact: {exact}; rows of repair that cost nothing: {outcome['repair_rows']}"
    yield f"{outcome['failed']} parts failed, {outcome['skipped']} were skipped; {found['seconds']:.0f} s; all of it: {file}"


def _exactness(result: dict[str, Any]) -> Iterator[str]:
    check = result["self_check"]
    rope = "refused: " + check["refusal"] if check["refusal"] else f"rope {check['rope_error']:.1e}"
    yield f"  self-check: forward {check['forward_error']:.1e}, {rope}; allowed {result['tolerance']:.0e}"
    yield f"  the model's own two attentions differ by {result['floor']:.1e}"
    for name, way in result["ways"].items():
        yield f"  {name:<20}{way['error']:>9.1e}   {way['equal_tokens']} of {result['answer_tokens']} tokens equal"


def _decode_step(result: dict[str, Any]) -> Iterator[str]:
    yield f"  {'tokens':>8}{'rows':>6}{'step':>11}{'queued':>11}{'x plain':>9}{'read':>12}  bound by"
    for row in result["rows"]:
        yield (
            f"  {row['length']:>8}{row['repair_rows']:>6}{row['step_ms']:>8.2f} ms{row['queued_ms']:>8.2f} ms"
            f"{row['times_plain']:>9.2f}{row['read_gb_s']:>7.0f} GB/s  {row['bound_by']}"
        )


def _first_token(result: dict[str, Any]) -> Iterator[str]:
    yield f"  {'tokens':>8}{'cold':>11}{'hit':>11}{'none':>11}{'before':>11}{'after':>11}{'speed-up':>10}{'bound':>8}"
    for row in result["rows"]:
        times = "".join(f"{row[name + '_ms']:>8.1f} ms" for name in ("cold", "hit", "none", "before", "after"))
        yield f"  {row['length']:>8}{times}{row['after_speedup']:>9.1f}x{row['after_bound']:>7.1f}x"


def _copies(result: dict[str, Any]) -> Iterator[str]:
    for name in ("run_of_slots", "scattered_slots", "from_host"):
        row = result[name]
        share = f"{row['of_bandwidth']:.0%} of a plain copy"
        yield f"  {name:<16}{row['ms']:>9.2f} ms{row['gb_s']:>8.1f} GB/s, {share}, {result['tokens']} tokens"


def _capture(result: dict[str, Any]) -> Iterator[str]:
    for name in ("prefill", "decode"):
        row = result[name]
        step = f"{row['step_ms']:.2f} ms, with a capture {row['step_with_capture_ms']:.2f} ms ({row['overhead']:+.1%})"
        yield f"  {name}: step {step}; {row['captured_tokens']} tokens on the host after {row['landed_ms']:.2f} ms"


_TABLES = {
    "exactness": _exactness,
    "decode_step": _decode_step,
    "first_token": _first_token,
    "copies": _copies,
    "capture": _capture,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    return run_command(build_parser, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
