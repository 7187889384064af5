"""`kvgraft explain`: what was reused for one request of a served engine, from its report file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

_VARIABLE = "KVGRAFT_REPORT_FILE"


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "explain",
        help="say what was reused for a request of a served engine",
        description="Read the report of one request from the file that the integration writes, and print it.",
    )
    parser.add_argument("--request-id", required=True, help="the engine's id of the request, or how it begins")
    parser.add_argument("--file", default="", help=f"report file; without it {_VARIABLE} names it")
    parser.add_argument("--json", action="store_true", help="print the report as it is")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Find and print; 1 if no such request is in the file."""
    name = args.file or os.environ.get(_VARIABLE, "")
    if not name:
        raise ConfigError(f"no report file is given; pass --file or set {_VARIABLE}")
    found = [entry for entry in _entries(Path(name)) if str(entry.get("request_id", "")).startswith(args.request_id)]
    if not found:
        print(f"no request {args.request_id} in {name}")
        return 1
    print(json.dumps(found[-1], indent=1) if args.json else "\n".join(explanation(found[-1])))
    return 0


def explanation(entry: dict[str, Any]) -> Iterator[str]:
    """Yield a report as lines for people."""
    yield f"request {entry['request_id']}: {entry['outcome']}, {entry['output_tokens']} tokens generated"
    attempts = entry["attempts"]
    for number, attempt in enumerate(attempts, 1):
        if len(attempts) > 1:
            yield f"attempt {number} of {len(attempts)}" + (" (lost its slots)" if number < len(attempts) else "")
        yield from _attempt(attempt)


def _attempt(attempt: dict[str, Any]) -> Iterator[str]:
    total = attempt["num_tokens"]
    for label, count in (
        ("exact prefix", attempt["exact_tokens"]),
        ("copied from another position", attempt["shifted_tokens"]),
        ("copied from other tokens", attempt["substituted_tokens"]),
        ("computed", attempt["computed_tokens"]),
    ):
        if count or label == "computed":
            yield f"  {count:7d} of {total} prompt tokens {label}"
    if attempt["recomputed_tokens"]:
        yield f"  {attempt['recomputed_tokens']:7d} of the computed ones by policy {attempt['policy']}"
    if attempt.get("corrected_tokens"):
        yield f"  {attempt['corrected_tokens']:7d} of the copied ones corrected by their drift"
    if attempt.get("substitution"):
        told = attempt["substitution"]
        words = "".join(f", {name} {value}" for name, value in told["metadata"].items())
        yield f"  another text stands in: {told['source_id'] or 'without a name'}{words}"
    for span, source in zip(attempt["spans"], attempt["sources"], strict=True):
        last = span["target_start"] + span["length"] - 1
        yield (
            f"  positions {span['target_start']}-{last} from position {source['position']} of request {source['request']}"
            f" ({source['tier']} memory, {span['fidelity']}, generation {span['generation']})"
        )
    if attempt["miss"] is not None:
        yield f"  nothing copied: {attempt['miss']['reason']}; {attempt['miss']['detail']}"
    elif "risk" in attempt:
        yield f"  risk of the copied tokens: {_risk(attempt['risk'])}"
    timings = ", ".join(f"{step} {value:.2f} ms" for step, value in attempt["timings_ms"].items() if value is not None)
    yield f"  {attempt['prefill_steps']} prefill steps, {timings}"


def _risk(risk: dict[str, Any]) -> str:
    if "reason" in risk:
        return f"{risk['status']}; {risk['reason']}"
    stated = f"{risk['loss']} at most {risk['epsilon']:.3g} with a probability of being wrong of {risk['delta']:.3g}"
    return f"{risk['status']}; {stated}, notch {risk['notch']!r}, {risk['audits']} audits"


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                if line.strip():
                    yield json.loads(line)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as reports, one JSON object per line: {error}") from error
