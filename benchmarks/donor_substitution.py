"""Stale answers: full prefill, kvgraft, and reuse that takes a near-duplicate's K/V as they are, on adversarial pairs.

    python benchmarks/donor_substitution.py [PACK] [--model M] [--limit 40] [--split test] [--seed 0] [--json]

PACK has pairs of texts that differ in the answer to one question (`adversarial.pairs.jsonl`). One text is read with the
question, then the other is asked. The baseline does what a cache does that goes by similarity: it finds the near-duplicate,
takes its K/V for everything before the end that both prompts share, and computes the rest. It lives here and not in the
package. Whether an answer is stale (right for the text read before, and not for this one) is judged for all three alike.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvgraft.bench.fidelity.answers import contains, is_stale
from kvgraft.bench.fidelity.rows import resamples
from kvgraft.bench.fidelity.sample import draw
from kvgraft.bench.fidelity.split import SPLITS, split
from kvgraft.bench.fidelity.subject import Subject, stock_attention
from kvgraft.bench.fidelity.suites import load_suite
from kvgraft.cli.progress import progress
from kvgraft.engine import LLM, SamplingParams
from kvgraft.errors import KVGraftError
from kvgraft.fidelity import cache_argument, cache_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from kvgraft.bench.fidelity.request import FidelityRequest
    from kvgraft.types import TokenArray

ANSWER_TOKENS = 32
FULL, KVGRAFT, SUBSTITUTED = "full prefill", "kvgraft", "donor's K/V"


@torch.inference_mode()
def substituted_answer(model: PreTrainedModel, prompt: TokenArray, donor: TokenArray, eos: frozenset[int]) -> list[int]:
    """Answer `prompt` from the K/V of `donor`, which take the place of everything before the common end."""
    shorter = min(len(prompt), len(donor)) - 1
    differs = np.flatnonzero(prompt[::-1][:shorter] != donor[::-1][:shorter])
    common = max(1, int(differs[0]) if len(differs) else shorter)
    past = cache_of(model(_row(donor[:-common], model), use_cache=True, logits_to_keep=1))
    newest, answer = prompt[-common:], []
    while len(answer) < ANSWER_TOKENS and not (answer and answer[-1] in eos):
        logits = model(_row(newest, model), use_cache=True, logits_to_keep=1, **cache_argument(model, past)).logits
        answer.append(int(logits[0, -1].argmax()))
        newest = np.asarray(answer[-1:])
    return answer


def _row(token_ids: TokenArray, model: PreTrainedModel) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(token_ids))[None].to(model.device)


def answers(llm: LLM, subject: Subject, request: FidelityRequest) -> dict[str, list[int]]:
    """Answer one request three times."""
    assert request.donor_prompt is not None
    prompt, donor = subject.encode(request.prompt), subject.encode(request.donor_prompt)
    sampling = SamplingParams(ANSWER_TOKENS)
    llm.reset()
    full = llm.generate(prompt, sampling, "off")[0].token_ids
    llm.reset()
    llm.generate(donor, SamplingParams(1), "off")
    grafted = llm.generate(prompt, sampling)[0].token_ids
    with llm.adapter.stock(stock_attention(llm)) as model:
        taken = substituted_answer(model, prompt, donor, llm.eos_token_ids)
    return {FULL: list(full), KVGRAFT: list(grafted), SUBSTITUTED: taken}


def rows(found: Sequence[dict[str, dict[str, float]]], groups: Sequence[str], seed: int) -> list[dict[str, Any]]:
    """Rates over requests with 95 % intervals, all three resampled alike."""
    drawn = resamples(groups, seed)
    table = []
    for method in (FULL, KVGRAFT, SUBSTITUTED):
        row: dict[str, Any] = {"method": method, "n": len(found)}
        for figure in ("stale", "right"):
            values = np.array([each[method][figure] for each in found])
            low, high = np.percentile([values[indices].mean() for indices in drawn], (2.5, 97.5))
            row[figure] = float(values.mean())
            row[f"{figure}_ci"] = [float(low), float(high)]
        table.append(row)
    return table


def measure(llm: LLM, requests: Sequence[FidelityRequest], *, limit: int, seed: int) -> list[dict[str, Any]]:
    """Judge the answers of a sample."""
    subject = Subject(llm, max_prompt_tokens=2048)
    sample = draw(requests, limit, subject.fits, seed)
    found, groups = [], []
    with progress(len(sample.indices), "requests") as advance:
        for request in (requests[index] for index in sample.indices):
            texts = {method: subject.text(tokens) for method, tokens in answers(llm, subject, request).items()}
            found.append(
                {
                    method: {
                        "stale": is_stale(text, request.answers, request.stale),
                        "right": contains(text, request.answers),
                    }
                    for method, text in texts.items()
                }
            )
            groups.append(request.group)
            advance()
    return rows(found, groups, seed)


def main() -> int:
    """Parse the command line and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pack", nargs="?", default="../shared/data/dev/adversarial.pairs")
    parser.add_argument("--model", default="graft-tiny")
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--split", choices=SPLITS, default="test")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    try:
        pack = args.pack if "/" in args.pack else f"./{args.pack}"
        requests = [each for each in split(load_suite(pack, "").requests, args.split) if each.donor is not None]
        table = measure(LLM(args.model), requests, limit=args.limit, seed=args.seed)
    except KVGraftError as error:
        print(f"donor_substitution: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(table, indent=1))
        return 0
    for row in table:
        intervals = {name: "{:.0%}-{:.0%}".format(*row[f"{name}_ci"]) for name in ("stale", "right")}
        print(
            f"{row['method']:14s} stale {row['stale']:>6.1%} ({intervals['stale']})   right {row['right']:>6.1%} "
            f"({intervals['right']})   of {row['n']}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
