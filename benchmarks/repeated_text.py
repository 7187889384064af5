"""KL to full prefill of a text that the prompt says twice, copied at its second place, and of one that it says once.

    python benchmarks/repeated_text.py --model smollm2-135m --cases 12

A conversation about a document of four entries of the standard library's documentation; the user quotes one of them (cases 0,
2, ...) or two (1, 3, ...) and asks about it. `repeated`: the document stands in the prompt, and the quotation is copied from
it. `once`: another document stands there, and the quotation is copied from a prompt of before. Both repair before the first
token, with the default policy; `repeated, a tenth` computes of repeated tokens no more than of others. Prints JSON: a row per
case, and medians of the three and of their ratios to `once`.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys

import numpy as np

from kvgraft.bench.fidelity.builtin import described
from kvgraft.engine import LLM, SamplingParams
from kvgraft.fidelity import divergence
from kvgraft.graft.select import QuerySeam, SelectionContext

WAYS = ("once", "repeated", "repeated, a tenth")
_SHARE = 0.1
_ENTRY = 700
"""Characters of an entry."""


class _Plain(QuerySeam):
    """Counts repeated tokens as others."""

    def budget(self, context: SelectionContext) -> int:
        """Return the number of tokens of the share."""
        return math.ceil(self.ratio * len(context.reused))


def main() -> int:
    """Print the record's JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--cases", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=16, help="of the answer that is compared")
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    llm = LLM(args.model, dtype="float32", num_slots=8_000, heal="off")
    rng, entries = random.Random(args.seed), list(described())
    rows = []
    for number in range(args.cases):
        texts = [f"{name}\n{text}"[:_ENTRY] for name, text, _ in rng.sample(entries, 8)]
        rows.append(measured(llm, texts, 1 + number % 2, args.tokens))
        print(number, rows[-1], file=sys.stderr, flush=True)
    print(json.dumps({**vars(args), "rows": rows, "medians": medians(rows)}, indent=1))
    return 0


def measured(llm: LLM, texts: list[str], num_quoted: int, num_tokens: int) -> dict[str, object]:
    """Return the figures of a case: `texts` are four entries of the document, and four of another."""
    document, other = "\n\n".join(texts[:4]), "\n\n".join(texts[4:])
    quoted = "\n\n".join(texts[1 : 1 + num_quoted])
    row: dict[str, object] = {"quoted_entries": num_quoted}
    for way in WAYS:
        front = _front(other if way == "once" else document)
        prompt = f"{front}\n\nUser: It says: {quoted} Explain it in a sentence.\n\nAssistant:"
        llm.reset()
        if way == "once":
            llm.generate(f"Some notes.\n\n{document}\n\nSummary:", SamplingParams(1))
        llm.generate(front, SamplingParams(1))
        policy = _Plain(_SHARE) if way == "repeated, a tenth" else QuerySeam(_SHARE)
        row[way] = _compared(llm, prompt, num_tokens, policy)
    return row


def _front(document: str) -> str:
    return f"You are a helpful assistant.\n\n{document}\n\nUser: What is this about?\n\nAssistant: Documentation of Python."


def _compared(llm: LLM, prompt: str, num_tokens: int, policy: QuerySeam) -> dict[str, float]:
    sampling = SamplingParams(num_tokens, ignore_eos=True)
    reference = llm.dictate(prompt, [], sampling, "off", cache_salt="reference", repair="before")
    with llm.probe(prompt, num_tokens, selection=policy, repair="before") as probe:
        found = divergence(reference.logits, probe.logits(np.asarray(reference.token_ids)))
        report = probe.report
    return {
        "mean_kl": found.mean_kl,
        "first_kl": found.first_kl,
        "shifted_tokens": report.shifted_tokens,
        "recomputed_tokens": report.recomputed_tokens,
    }


def medians(rows: list[dict]) -> dict[str, dict[str, float]]:
    """Return the median of each figure by way, and of its ratio to `once`."""
    return {
        way: {figure: statistics.median(row[way][figure] for row in rows) for figure in ("mean_kl", "first_kl")}
        | {
            f"{figure}_of_once": statistics.median(row[way][figure] / row["once"][figure] for row in rows)
            for figure in ("mean_kl", "first_kl")
        }
        for way in WAYS
    }


if __name__ == "__main__":
    sys.exit(main())
