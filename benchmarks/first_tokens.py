"""First tokens of answers before the repair and after it, by how sure the model is of them: when is it worth to wait?

    python benchmarks/record.py first-tokens -- python benchmarks/first_tokens.py --suites tools rag builtin --limit 60

Every request is asked of the same donors three times: with nothing reused, with the repair after the first token, and before
it. A *flip* is another most likely token than that with nothing reused. The margin is that between the two most likely tokens
over plain copies, which `repair_below_margin` compares. `choice`: the same of the tokens that begin the name of a function
in the prompt, as where an answer must be one of them; only requests with two such tokens at least count.
Prints JSON: a row per request, and per suite the flips for each margin, with 95 % intervals from 4,000 resamples.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.bench.fidelity.one_space import in_one_space
from kvgraft.bench.fidelity.run import plan_suite
from kvgraft.bench.fidelity.sample import blocks
from kvgraft.bench.fidelity.subject import Subject
from kvgraft.bench.fidelity.suites import load_suite
from kvgraft.config import EngineConfig
from kvgraft.engine import LLM, SamplingParams
from kvgraft.fidelity import divergence

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from kvgraft.bench.fidelity.sample import SampledRequest
    from kvgraft.types import TokenArray

RESAMPLES = 4_000
_NAME = re.compile(r'"name": "([^"]+)"')


def main() -> int:
    """Print the record's JSON."""
    parser = suite_parser(__doc__, limit=60, max_prompt_tokens=2_048)
    parser.add_argument("--margins", type=float, nargs="+", default=[0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.5, 1.0])
    args = parser.parse_args()
    llm = opened(args)
    subject, rows = Subject(llm, args.max_prompt_tokens), []
    for suite, step in sampled(llm, subject, args):
        row = measured(llm, subject, step)
        if row is not None:
            rows.append({"suite": suite, **row})
            print(len(rows), rows[-1], file=sys.stderr, flush=True)
    print(json.dumps({**vars(args), "rows": rows, "summary": summary(rows, args)}, indent=1))
    return 0


def suite_parser(doc: str, *, limit: int, max_prompt_tokens: int) -> argparse.ArgumentParser:
    """Return a parser of what says which requests are asked, and of which model."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--data", default="../shared/data/dev")
    parser.add_argument("--suites", nargs="+", default=["builtin"])
    parser.add_argument("--limit", type=int, default=limit, help="requests per suite")
    parser.add_argument("--max-prompt-tokens", type=int, default=max_prompt_tokens)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def opened(args: argparse.Namespace) -> LLM:
    """Return the model, of which no first token waits."""
    return LLM(args.model, in_one_space(EngineConfig(dtype=args.dtype, heal="off", repair_below_margin=0.0)))


def sampled(llm: LLM, subject: Subject, args: argparse.Namespace) -> Iterator[tuple[str, SampledRequest]]:
    """Yield the sampled requests of all suites; nothing is known before those that share documents."""
    for name in args.suites:
        plan = plan_suite(load_suite(name, args.data), subject, side="all", limit=args.limit, seed=args.seed)
        for block in blocks(plan.requests, plan.sample.indices, subject.fits):
            llm.reset()
            for step in block:
                yield name, step


def measured(llm: LLM, subject: Subject, step: SampledRequest) -> dict[str, object] | None:
    """Return the figures of a request; None where nothing of it can be grafted."""
    for donor in step.donors:
        llm.generate(subject.encode(donor), SamplingParams(1), "exact")
    prompt = subject.encode(step.request.prompt)
    after, is_grafted = first_logits(llm, prompt, repair="after")
    before, _ = first_logits(llm, prompt, repair="before")
    full, _ = first_logits(llm, prompt, reuse="off")
    if step.is_read:
        llm.generate(prompt, SamplingParams(1), "exact")
    if not is_grafted:
        return None
    first, second = after.softmax(-1).topk(2).values[0].tolist()
    found = {"after": divergence(full, after), "before": divergence(full, before)}
    row: dict[str, object] = {"num_tokens": len(prompt), "margin": first - second}
    row |= {f"kl_{way}": each.first_kl for way, each in found.items()}
    row |= {way: each.first_flip for way, each in found.items()}
    names = _NAME.findall(step.request.prompt)
    allowed = sorted({int(subject.gold((name,))[0]) for name in names})
    if len(allowed) > 1:
        ways = {"after": after, "before": before}
        row |= {
            f"choice_{way}": divergence(full[:, allowed], each[:, allowed]).first_flip for way, each in ways.items()
        }
    return row


def first_logits(llm: LLM, prompt: TokenArray, **options: str) -> tuple[Tensor, bool]:
    """Return float64 logits (1, vocab_size) of the first token, and whether something was grafted."""
    with llm.probe(prompt, 2, options.pop("reuse", "graft"), **options) as probe:
        return probe.logits(np.array([0, 0]))[:1].double(), bool(probe.report.shifted_tokens)


def summary(rows: list[dict], args: argparse.Namespace) -> dict[str, object]:
    """Return, per suite and over all: flips by the margin below which first tokens wait, and how often they do."""
    found: dict[str, object] = {}
    for suite in (*args.suites, "all"):
        mine = [row for row in rows if suite in (row["suite"], "all")]
        if not mine:
            continue
        margin, after, before = (np.array([row[name] for row in mine], float) for name in ("margin", "after", "before"))
        drawn = np.random.default_rng(args.seed).integers(len(mine), size=(RESAMPLES, len(mine)))
        choices = [row for row in mine if "choice_after" in row]
        found[suite] = {
            "n": len(mine),
            "flips_before": before.mean(),
            "flips_before_ci": interval(before, drawn),
            "kl_after": float(np.mean([row["kl_after"] for row in mine])),
            "kl_before": float(np.mean([row["kl_before"] for row in mine])),
            "choices": len(choices),
            "choice_flips_after": float(np.mean([row["choice_after"] for row in choices])) if choices else None,
            "choice_flips_before": float(np.mean([row["choice_before"] for row in choices])) if choices else None,
            "by_margin": [
                {
                    "margin": below,
                    "wait": float((margin < below).mean()),
                    "flips": float(np.where(margin < below, before, after).mean()),
                    "flips_ci": interval(np.where(margin < below, before, after), drawn),
                }
                for below in args.margins
            ],
        }
    return found


def interval(values: np.ndarray, drawn: np.ndarray) -> list[float]:
    """Return the 95 % interval of the mean over resamples."""
    found: list[float] = np.quantile(values[drawn].mean(1), [0.025, 0.975]).tolist()
    return found


if __name__ == "__main__":
    sys.exit(main())
