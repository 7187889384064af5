"""`kvgraft demo`: a real model answers prompts over real documents, with reuse off, exact and grafted."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.cli.model_options import add_model_options, engine_config, load_llm
from kvgraft.cli.progress import progress
from kvgraft.errors import ConfigError
from kvgraft.types import ReuseMode

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from kvgraft.demo.runner import ModeResult
    from kvgraft.engine import LLM


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "demo",
        help="a RAG session with and without reuse, side by side",
        description="Build a RAG session from the standard library's own sources, run it with reuse off, with exact prefixes "
        "and grafted, and print tokens reused, time to first token and agreement with full prefill.",
    )
    parser.add_argument("--requests", type=int, default=24, metavar="N", help="requests in the session (default 24)")
    parser.add_argument("--documents", type=int, default=8, metavar="N", help="documents per request (default 8)")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of a table")
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the session under every mode."""
    if args.requests < 1 or not 1 <= args.documents <= 24:
        raise ConfigError("--requests must be at least 1 and --documents between 1 and 24")
    from kvgraft.demo.session import rag_session

    session = rag_session(args.requests, args.documents, args.seed)
    llm = load_llm(engine_config(args))
    if llm.graft_refusal is not None:
        raise ConfigError(f"this model's K/V cannot be moved: {llm.graft_refusal}; choose another --model")
    results = _run_modes(llm, [request.prompt for request in session])
    if args.json:
        print(
            json.dumps(
                {"model": llm.loaded.name, "requests": len(session), "modes": [_as_json(r) for r in results]}, indent=1
            )
        )
    else:
        _print_table(llm, results)
    return 0


def _run_modes(llm: LLM, prompts: Sequence[str]) -> list[ModeResult]:
    from kvgraft.demo.runner import Mode, SessionRunner

    modes = [
        Mode("exact", ReuseMode.EXACT, "none"),
        Mode("graft", ReuseMode.GRAFT, llm.policy.name),
        Mode("graft, none recomputed", ReuseMode.GRAFT, "none"),
    ]
    with progress(len(prompts) * (1 + len(modes)), "requests") as advance:
        runner = SessionRunner(llm, prompts, advance)
        return [runner.full_prefill(), *(runner.run(mode) for mode in modes)]


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
        "32-token continuation;\noff and exact reuse nothing approximate."
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
