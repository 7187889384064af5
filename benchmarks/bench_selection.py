"""How close each selection policy comes to full prefill, at equal donors: KL, top-1 and greedy-32 over a RAG session.

    python benchmarks/bench_selection.py [--model graft-tiny] [--requests 32] [--json]

The first half of the session is read with reuse off and gives the donors. The second half is scored under every policy
against the same donors; scoring leaves the cache as it is.
"""

from __future__ import annotations

import argparse
import dataclasses
import json

import numpy as np

from kvgraft.cli.progress import progress
from kvgraft.demo.session import rag_session
from kvgraft.engine import LLM, SamplingParams
from kvgraft.fidelity import AgreementSummary, compare
from kvgraft.graft.select import FirstK, NoRecompute, QuerySeam, SelectionPolicy

CONTINUATION = SamplingParams(32, ignore_eos=True)


def policies() -> dict[str, SelectionPolicy]:
    """Policies by label, cheapest first."""
    labelled: dict[str, SelectionPolicy] = {"none": NoRecompute()}
    labelled |= {f"first_k {k}": FirstK(k) for k in (8, 16, 32, 64)}
    return labelled | {f"query_seam {ratio:.0%}": QuerySeam(ratio) for ratio in (0.02, 0.05, 0.15, 0.3)}


def measure(llm: LLM, prompts: list[str]) -> list[dict[str, object]]:
    """Return a row per policy."""
    tokenized = [llm.tokenize(prompt) for prompt in prompts]
    donors, scored = tokenized[: len(tokenized) // 2], tokenized[len(tokenized) // 2 :]
    labelled = policies()
    agreements: dict[str, list] = {label: [] for label in labelled}
    recomputed: dict[str, list[float]] = {label: [] for label in labelled}
    with progress(len(donors) + len(scored), "requests") as advance:
        for prompt in donors:
            llm.generate(prompt, SamplingParams(1), "off")
            advance()
        for prompt in scored:
            continuation, full = full_prefill(llm, prompt)
            for label, policy in labelled.items():
                score = llm.score(prompt, continuation, "graft", selection=policy)
                agreements[label].append(
                    compare(full, score.logits, continuation.tolist(), score.logits.argmax(-1).tolist())
                )
                report = score.report
                recomputed[label].append(
                    report.recomputed_tokens / max(1, report.recomputed_tokens + report.shifted_tokens)
                )
            advance()
    return [
        {
            "policy": label,
            "recomputed_share": float(np.mean(recomputed[label])),
            **dataclasses.asdict(AgreementSummary.of(rows)),
        }
        for label, rows in agreements.items()
    ]


def full_prefill(llm: LLM, prompt: np.ndarray) -> tuple[np.ndarray, object]:
    """Greedy continuation of full prefill and its logits; nothing of it stays in the cache."""
    tokens: list[int] = []
    for part in llm.stream(
        prompt, dataclasses.replace(CONTINUATION, max_new_tokens=CONTINUATION.max_new_tokens + 1), "off"
    ):
        tokens.append(part.token_id)
        if len(tokens) == CONTINUATION.max_new_tokens:
            break
    continuation = np.asarray(tokens)
    return continuation, llm.score(prompt, continuation, "off").logits


def main() -> None:
    """Parse the command line and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="graft-tiny")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = measure(LLM(args.model), [request.prompt for request in rag_session(args.requests, 8, args.seed)])
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        print(
            f"{row['policy']:16s}{row['recomputed_share']:>8.1%}  KL {row['mean_kl']:.5f}  top-1 {row['top1']:.2%}"
            f"  greedy-32 {row['greedy_equal']:.0%}"
        )


if __name__ == "__main__":
    main()
