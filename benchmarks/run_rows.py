"""KL to full prefill of one long copied text, by how many recomputed rows are corrected in one piece (ADR 6). Paired.

    python benchmarks/record.py run-rows -- python benchmarks/run_rows.py --cases 15

Documents of the pack `xinstr`, cut to `--lengths` in turns, so that a tenth of a copy is 70 to 190 rows of one run. Each
was read after another head before, and is copied. Same prompts, donors, policy and answer for every bound; repairs come
before the first token, which changes when rows are computed and not which. `uncorrected` has no correction.
Prints JSON: a row per case, medians, and ratios of means with 95 % intervals from 4,000 resamples of cases.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys

import numpy as np

from kvgraft.bench.fidelity.suites import load_suite
from kvgraft.engine import LLM, SamplingParams
from kvgraft.fidelity import divergence
from kvgraft.graft import drift_plan

UNCORRECTED = "uncorrected"
_RESAMPLES = 4_000


def main() -> int:
    """Print the record's JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--data", default="../shared/data/dev")
    parser.add_argument("--cases", type=int, default=15)
    parser.add_argument("--lengths", type=int, nargs="+", default=[700, 1_250, 1_900], help="of documents, in turns")
    parser.add_argument("--bounds", type=int, nargs="+", default=[128, 64, 32])
    parser.add_argument("--tokens", type=int, default=16, help="of the answer that is compared")
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    num_slots = max(9_000, 5 * max(args.lengths))
    llm, texts = LLM(args.model, dtype="float32", num_slots=num_slots, heal="off"), documents(args.data)
    rng, rows = random.Random(args.seed), []
    rng.shuffle(texts)
    for number, text in enumerate(texts[: args.cases]):
        rows.append(measured(llm, text, args.lengths[number % len(args.lengths)], args))
        print(number, rows[-1], file=sys.stderr, flush=True)
    print(json.dumps({**vars(args), "rows": rows, "summary": summary(rows, args)}, indent=1))
    return 0


def documents(data: str) -> list[str]:
    """Return the long texts of the pack, each once."""
    suite = load_suite("xinstr", data)
    return sorted({max((part.text for part in request.parts), key=len) for request in suite.requests})


def measured(llm: LLM, text: str, length: int, args: argparse.Namespace) -> dict[str, object]:
    """Return the figures of a case for each bound, and without a correction."""
    document = llm.tokenize(text)[:length]
    donor = np.concatenate([llm.tokenize("Some notes.\n\n"), document, llm.tokenize("\n\nSummary:")])
    head = llm.tokenize("You are a helpful assistant. Read the following and answer the question after it.\n\n")
    prompt = np.concatenate([head, document, llm.tokenize("\n\nQuestion: What is this about?\n\nAnswer:")])
    llm.reset()
    llm.generate(donor, SamplingParams(1))  # nothing is known yet
    sampling = SamplingParams(args.tokens, ignore_eos=True)
    reference = llm.dictate(prompt, [], sampling, "off", cache_salt="reference", repair="before")
    row: dict[str, object] = {"document_tokens": len(document)}
    for way in (*args.bounds, UNCORRECTED):
        drift_plan.MAX_RUN_ROWS = args.bounds[0] if way == UNCORRECTED else way
        correction = "none" if way == UNCORRECTED else None
        with llm.probe(prompt, args.tokens, correction=correction, repair="before") as probe:
            found = divergence(reference.logits, probe.logits(np.asarray(reference.token_ids)))
            report = probe.report
        row[str(way)] = {
            "mean_kl": found.mean_kl,
            "first_kl": found.first_kl,
            "shifted_tokens": report.shifted_tokens,
            "recomputed_tokens": report.recomputed_tokens,
            "corrected_tokens": report.corrected_tokens,
        }
    return row


def summary(rows: list[dict], args: argparse.Namespace) -> dict[str, object]:
    """Return means, medians, and ratios to the first bound."""
    rng = np.random.default_rng(args.seed)
    drawn = rng.integers(len(rows), size=(_RESAMPLES, len(rows)))
    found: dict[str, object] = {}
    for way in (*map(str, args.bounds), UNCORRECTED):
        found[way] = {}
        for figure in ("mean_kl", "first_kl"):
            mine = np.array([row[way][figure] for row in rows])
            first = np.array([row[str(args.bounds[0])][figure] for row in rows])
            ratios = mine[drawn].mean(1) / first[drawn].mean(1)
            found[way][figure] = {
                "mean": float(mine.mean()),
                "median": float(np.median(mine)),
                "times_first": float(mine.mean() / first.mean()),
                "times_first_ci": np.quantile(ratios, [0.025, 0.975]).tolist(),
                "median_times_first": statistics.median((mine / first).tolist()),
                "nearer_than_first": float((mine < first).mean()),
            }
    return found


if __name__ == "__main__":
    sys.exit(main())
