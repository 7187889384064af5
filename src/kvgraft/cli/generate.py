"""`kvgraft generate`: answer one or more prompts and say what was reused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvgraft.cli.model_options import add_model_options, engine_config, load_checked
from kvgraft.cli.parser import show_first
from kvgraft.cli.preflight import check_start
from kvgraft.cli.watching import trace_file
from kvgraft.errors import ConfigError, one_line
from kvgraft.reuse.report import report_as_dict
from kvgraft.types import CONTINUATION, ReuseMode

if TYPE_CHECKING:
    import argparse

    from kvgraft.engine import LLM, RequestOutput, SamplingParams
    from kvgraft.types import GraftReport


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "generate",
        help="answer prompts and say what was reused",
        usage="kvgraft generate [OPTION ...] [PROMPT ...]",
        description="Answer prompts in order; each may reuse what the model read in earlier ones. Prompts come from "
        "arguments, from files (one prompt a file) or, with neither, from standard input.",
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="a prompt; several are answered in order")
    parser.add_argument(
        "-f", "--file", action="append", default=[], metavar="FILE", help="read a prompt from a file; repeatable"
    )
    parser.add_argument(
        "--reuse",
        choices=[*ReuseMode],
        default="graft",
        help="what may be reused (default graft); verified: drafts as with graft, the answer of a full prefill",
    )
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="0 is all")
    parser.add_argument("--seed", type=int, metavar="N")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end the output before TEXT; repeatable"
    )
    _add_rules(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON array instead of text")
    add_model_options(parser, "trace_out")
    show_first(
        parser,
        "--file",
        "--reuse",
        "--max-new-tokens",
        "--temperature",
        "--seed",
        "--stop",
        "--json",
        "--model",
        "--config",
    )
    parser.set_defaults(run=run)


def _add_rules(parser: argparse.ArgumentParser) -> None:
    """Add what else `SamplingParams` may say about the tokens, under its names."""
    rules = parser.add_argument_group("what tokens may be drawn")
    rules.add_argument(
        "--min-p", type=float, default=0.0, metavar="P", help="this share of the likeliest token's at least"
    )
    rules.add_argument("--min-tokens", type=int, default=0, metavar="N", help="do not end before so many tokens")
    rules.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X", help="1 is none")
    rules.add_argument("--frequency-penalty", type=float, default=0.0, metavar="X", help="-2 to 2; 0 is none")
    rules.add_argument("--presence-penalty", type=float, default=0.0, metavar="X", help="-2 to 2; 0 is none")
    structure = rules.add_mutually_exclusive_group()
    structure.add_argument("--json-schema", metavar="FILE", help="answer with a JSON value of the schema in FILE")
    structure.add_argument("--json-object", action="store_true", help="answer with a JSON object")
    structure.add_argument(
        "--regex", metavar="PATTERN", help="answer with a text that the expression matches as a whole"
    )
    structure.add_argument(
        "--choice", action="append", metavar="TEXT", help="answer with one of these texts; repeatable"
    )


def run(args: argparse.Namespace) -> int:
    """Answer the prompts."""
    prompts = _prompts(args)
    schema = None if args.json_schema is None else _schema(args.json_schema)
    config = engine_config(args)
    check_start(config)
    sampling = _sampling(args, schema)  # imports torch, and is refused before a model is loaded
    with trace_file(config) as trace:
        llm = load_checked(config, shows_stages=not args.json, recorder=trace)
        _answer(llm, prompts, sampling, args)
    return 0


def _answer(llm: LLM, prompts: list[str], sampling: SamplingParams, args: argparse.Namespace) -> None:
    if args.reuse == ReuseMode.GRAFT and llm.graft_refusal is not None:
        raise ConfigError(f"this model's K/V cannot be moved: {llm.graft_refusal}; use --reuse exact")
    for prompt in prompts:
        llm.validate(prompt, sampling)
    if args.json:
        outputs = llm.generate(prompts, sampling, args.reuse)
        print(json.dumps([_as_json(output) for output in outputs], indent=1))
        return
    for prompt in prompts:
        _print_stream(llm, prompt, sampling, args.reuse)


def _sampling(args: argparse.Namespace, schema: dict[str, object] | bool | None) -> SamplingParams:
    from kvgraft.engine import SamplingParams, StructureSpec

    structure = None
    if schema is not None:
        structure = StructureSpec.json_schema(schema)
    elif args.json_object:
        structure = StructureSpec.json_object()
    elif args.regex is not None:
        structure = StructureSpec.regex(args.regex)
    elif args.choice is not None:
        structure = StructureSpec.choice(args.choice)
    return SamplingParams(
        args.max_new_tokens,
        args.temperature,
        args.top_p,
        args.top_k,
        args.seed,
        tuple(args.stop),
        min_p=args.min_p,
        min_tokens=args.min_tokens,
        repetition_penalty=args.repetition_penalty,
        frequency_penalty=args.frequency_penalty,
        presence_penalty=args.presence_penalty,
        structure=structure,
    )


def _schema(name: str) -> dict[str, object] | bool:
    """Read a JSON schema."""
    try:
        schema = json.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"cannot read a schema from --json-schema {name}: {one_line(error)}; give a JSON file"
        ) from error
    if not isinstance(schema, dict | bool):
        raise ConfigError(f'--json-schema {name} holds no schema; write an object such as {{"type": "object"}}')
    return schema


def _prompts(args: argparse.Namespace) -> list[str]:
    prompts = list(args.prompts)
    for name in args.file:
        try:
            prompts.append(Path(name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read prompt file {name}: {error}; give a file of UTF-8 text") from error
    # Python has no stdin where the shell closed it.
    if not prompts and sys.stdin is not None and not sys.stdin.isatty():
        prompts.append(_standard_input())
    if not prompts:
        raise ConfigError("no prompt was given; pass one as an argument, with --file or on standard input")
    if not all(prompts):
        raise ConfigError("a prompt is empty; give at least one character")
    return prompts


def _standard_input() -> str:
    """Read the prompt from standard input; which errors Python itself sees depends on the locale."""
    try:
        text = sys.stdin.read()
        text.encode()
    except UnicodeError as error:
        raise ConfigError("standard input is not UTF-8 text; convert it first, with iconv say") from error
    return text


def _print_stream(llm: LLM, prompt: str, sampling: SamplingParams, reuse: str) -> None:
    for part in llm.stream(prompt, sampling, reuse):
        print(part.text, end="", flush=True)
        if part.output is not None:
            print(f"\n[{summary(part.output)}]\n", flush=True)


def summary(output: RequestOutput) -> str:
    """Return one line about reuse and speed of a request."""
    report: GraftReport = output.report
    continued = f", {report.continued_tokens} continued" if report.continued_tokens else ""
    reused = f"{report.exact_tokens} exact{continued}, {report.shifted_tokens} shifted"
    parts = [f"{report.num_tokens} prompt tokens: {reused}"]
    parts.append(f"{report.computed_tokens} computed ({report.recomputed_tokens} of them again)")
    if report.healing is not None:
        healing = report.healing
        parts.append(f"{healing.drafted_tokens} drafted, {healing.retracted_tokens} of them not verified")
    elif report.num_donors:
        num_spans = sum(span.donor_id != CONTINUATION for span in report.spans)
        parts.append(f"{num_spans} spans of {report.num_donors} donors")
    elif report.miss is not None:
        parts.append(f"no graft: {report.miss.detail or report.miss.reason}")
    parts.append(f"first token after {output.ttft_s * 1e3:.0f} ms")
    return "; ".join(parts)


def _as_json(output: RequestOutput) -> dict[str, object]:
    return {
        "request_id": output.request_id,
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "ttft_s": output.ttft_s,
        "total_s": output.total_s,
        "report": report_as_dict(output.report),
    }
