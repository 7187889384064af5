"""How close each selection policy comes to full prefill, at equal donors: KL, top-1 and greedy-32 over a RAG session.

    python benchmarks/bench_selection.py [--model graft-tiny] [--requests 32] [--json]

The first half of the session is read with reuse off and gives the donors. The second half is scored under every policy
against the same donors; scoring leaves the cache as it is. Full prefill is the model's own forward pass in transformers,
which knows no cache. The row `off` is kvgraft's forward pass with nothing reused: as close to that as rounding allows. A
prompt of which nothing was grafted says nothing about grafts, so it ends the benchmark with an error.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.cli.progress import progress
from kvgraft.demo.session import rag_session
from kvgraft.engine import LLM, SamplingParams
from kvgraft.errors import ConfigError, KVGraftError
from kvgraft.fidelity import Agreement, AgreementSummary, StockAnswer, compare, stock_answer
from kvgraft.graft.select import FirstK, NoRecompute, QuerySeam, SelectionPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgraft.types import GraftReport, TokenArray

CONTINUATION_TOKENS = 32
OFF = "off"


def policies() -> dict[str, SelectionPolicy]:
    """Policies by label, cheapest first."""
    labelled: dict[str, SelectionPolicy] = {"none": NoRecompute()}
    labelled |= {f"first_k {k}": FirstK(k) for k in (8, 16, 32, 64)}
    return labelled | {f"query_seam {ratio:.0%}": QuerySeam(ratio) for ratio in (0.02, 0.05, 0.15, 0.3)}


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """One prompt under one policy."""

    agreement: Agreement
    report: GraftReport

    @property
    def recomputed_share(self) -> float:
        """Of the tokens that donors have."""
        known = self.report.recomputed_tokens + self.report.shifted_tokens
        return self.report.recomputed_tokens / known if known else 0.0


def measure(llm: LLM, prompts: Sequence[str], documents: int) -> list[dict[str, object]]:
    """Return a row per policy, `off` first.

    Raises:
        ConfigError: Nothing was grafted for one of the scored prompts.
    """
    tokenized = [llm.tokenize(prompt) for prompt in prompts]
    donors, scored = tokenized[: len(tokenized) // 2], tokenized[len(tokenized) // 2 :]
    labelled = policies()
    outcomes: dict[str, list[Outcome]] = {label: [] for label in (OFF, *labelled)}
    with progress(len(donors) + len(scored), "requests") as advance:
        for prompt in donors:
            llm.generate(prompt, SamplingParams(1), "off")
            advance()
        for number, prompt in enumerate(scored):
            with llm.adapter.stock("sdpa") as model:
                full = stock_answer(model, prompt, CONTINUATION_TOKENS)
            outcomes[OFF].append(outcome(llm, prompt, full, OFF))
            for label, policy in labelled.items():
                found = outcome(llm, prompt, full, "graft", policy)
                require_graft(found.report, f"scored prompt {number + 1} of {len(scored)} under {label}", documents)
                outcomes[label].append(found)
            advance()
    return [row(label, found) for label, found in outcomes.items()]


def outcome(
    llm: LLM, prompt: TokenArray, full: StockAnswer, reuse: str, policy: SelectionPolicy | None = None
) -> Outcome:
    """Score full prefill's continuation of one prompt."""
    score = llm.score(prompt, full.token_ids, reuse, selection=policy)
    # Greedy outputs are equal exactly if every next token along the reference's own continuation is the same.
    greedy = score.logits.argmax(-1).tolist()
    return Outcome(compare(full.logits, score.logits, full.token_ids.tolist(), greedy), score.report)


def require_graft(report: GraftReport, what: str, documents: int) -> None:
    """Raise unless something was grafted."""
    if not report.shifted_tokens:
        reason = f"{report.exact_tokens} of {report.num_tokens} tokens were an exact prefix"
        if report.miss is not None:
            reason = f"{report.miss.reason.value} {report.miss.detail}".strip()
        raise ConfigError(
            f"nothing was grafted for {what} ({reason}), so that it measures nothing; "
            f"raise --requests or --documents (now {documents})"
        )


def row(label: str, outcomes: Sequence[Outcome]) -> dict[str, object]:
    """Means over prompts."""
    return {
        "policy": label,
        "recomputed_share": float(np.mean([found.recomputed_share for found in outcomes])),
        "grafted_tokens": float(np.mean([found.report.shifted_tokens for found in outcomes])),
        **dataclasses.asdict(AgreementSummary.of([found.agreement for found in outcomes])),
    }


def main() -> int:
    """Parse the command line and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="graft-tiny")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--documents", type=int, default=8, help="per request")
    parser.add_argument("--num-slots", type=int, default=0, help="default: the engine's")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    session = rag_session(args.requests, args.documents, args.seed)
    slots = {"num_slots": args.num_slots} if args.num_slots else {}
    try:
        rows = measure(LLM(args.model, **slots), [request.prompt for request in session], args.documents)
    except KVGraftError as error:
        print(f"bench_selection: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(rows, indent=1))
        return 0
    for each in rows:
        print(
            f"{each['policy']:16s}{each['recomputed_share']:>8.1%}  KL {each['mean_kl']:.5f}  top-1 {each['top1']:.2%}"
            f"  greedy-32 {each['greedy_equal']:.0%}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
