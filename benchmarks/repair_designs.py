"""When the rows of a repair are computed: all before the second token, or some with each decode step, in which order?

    python benchmarks/record.py repair-designs-smollm2 -- python benchmarks/repair_designs.py --suites tools rag --limit 20

Of every request the answer of full prefill, 32 greedy tokens, is given step by step over the same donors:
- `none`: nothing is repaired, the time of an exact hit with as many new tokens;
- `at once`: the default's choice before the second token;
- `importance:c`: c rows of that choice before each further token, the most important first, the question's rows with the last
  of them; the correction goes with each;
- `correction:c`: first c rows of the choice spread over the copies, which correct the others, then as `importance`,
  without another correction;
- `causal:c`: no choice; c rows with each step from the first copy on, all exact (`repair_rows`).

Prints JSON: per request and design the KL of each token and the process's seconds until each; per suite the mean of KL over
tokens 2-8 and 2-32 and the median time of tokens 2, 8, 16 and 32 as a multiple of `none`'s, with 95 % intervals of the means.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from first_tokens import RESAMPLES, interval, opened, sampled, suite_parser
from kvgraft.bench.fidelity.subject import Subject
from kvgraft.engine import SamplingParams
from kvgraft.engine.requests.options import RequestOptions
from kvgraft.engine.requests.repair import RepairRules
from kvgraft.fidelity import divergence
from kvgraft.graft.model import SequenceRows
from kvgraft.graft.select.base import Recompute
from kvgraft.graft.select.context import selection_context
from kvgraft.graft.select.query_seam import QuerySeam
from kvgraft.graft.sparse_prefill import AnswerFirst
from kvgraft.graft.steps import GraftSteps, Scope
from kvgraft.types import RepairTime

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from torch import Tensor

    from kvgraft.bench.fidelity.sample import SampledRequest
    from kvgraft.engine import LLM
    from kvgraft.engine.core import Engine
    from kvgraft.engine.kv.request_kv import RequestKV
    from kvgraft.graft.model import SequenceOutput
    from kvgraft.graft.select.base import SelectionContext, SelectionSteps
    from kvgraft.types import TokenArray

_NUM_TOKENS = 32
_ALL_ROWS = 1 << 20
_TIMED = (1, 2, 8, 16, 32)


@dataclass(frozen=True)
class Scheduled(QuerySeam):
    """The choice of `query_seam`, `rows` of it in each pass.

    Attributes:
        rows: Rows of a pass.
        corrects_first: The first pass is spread over the choice and corrects what is not chosen; later ones correct nothing.
    """

    name: ClassVar[str] = "scheduled"
    rows: int = _ALL_ROWS
    corrects_first: bool = False

    def steps(self, context: SelectionContext) -> SelectionSteps:
        """Look, then yield the choice in passes, the highest scores first."""
        reused = context.reused
        observation = yield Recompute(reused[:0], observe_query=True)
        order = np.argsort(-self._score(context, observation), kind="stable")[: self.budget(context)]
        if self.corrects_first:
            chosen = np.sort(order)
            spread = chosen[np.unique(np.linspace(0, len(chosen) - 1, min(self.rows, len(chosen))).round().astype(int))]
            yield Recompute(reused[spread], sample=reused[spread])
            order = order[~np.isin(order, spread)]
        for start in range(0, len(order), self.rows):
            positions = np.sort(reused[order[start : start + self.rows]])
            yield Recompute(positions, sample=positions[:0] if self.corrects_first else positions)


class ScheduledSteps(GraftSteps):
    """Passes of which the last one alone computes the question's rows once more."""

    def __init__(self, *args: object, num_chosen: int, **options: object) -> None:
        """Take `num_chosen` rows for the whole choice."""
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self._num_left = num_chosen

    def _rows_of(self, step: Recompute) -> NDArray[np.int64]:
        self._num_left -= len(step.positions)
        if not len(step.positions) or self._num_left <= 0:
            return super()._rows_of(step)
        return step.positions


@dataclass(frozen=True)
class Answer:
    """An answer that was given step by step.

    Attributes:
        logits: float32 (tokens, vocab_size).
        times_s: Of the process, until each token.
        rows: Tokens of the prompt that were computed again, the question's not counted.
    """

    logits: Tensor
    times_s: tuple[float, ...]
    rows: int


def main() -> int:
    """Print the record's JSON."""
    parser = suite_parser(__doc__, limit=20, max_prompt_tokens=4_096)
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64], help="rows of a step")
    args = parser.parse_args()
    llm = opened(args)
    subject, rows = Subject(llm, args.max_prompt_tokens), []
    for suite, step in sampled(llm, subject, args):
        row = measured(llm, subject, step, args.rows)
        if row is not None:
            rows.append({"suite": suite, **row})
            print(len(rows), suite, row["num_tokens"], row["reused"], file=sys.stderr, flush=True)
    print(json.dumps({**vars(args), "rows_measured": rows, "summary": summary(rows, args)}, indent=1))
    return 0


def measured(llm: LLM, subject: Subject, step: SampledRequest, rows: list[int]) -> dict[str, object] | None:
    """Return the figures of a request; None where nothing of it is grafted and repaired after the first token."""
    for donor in step.donors:
        llm.generate(subject.encode(donor), SamplingParams(1), "exact")
    prompt = subject.encode(step.request.prompt)
    full = llm.dictate(prompt, [], SamplingParams(_NUM_TOKENS, ignore_eos=True), "off")
    found: dict[str, object] = {}
    reused = 0
    for design in designs(rows):
        answer, copied = given(llm, prompt, np.asarray(full.token_ids), design)
        if answer is None:
            found.clear()  # a prompt that says much twice is repaired before its first token, whatever the design
            break
        reused = copied if design == "none" else reused
        found[design] = {
            "kl": [float(f"{kl:.4g}") for kl in divergence(full.logits, answer.logits).token_kl],
            "seconds": [round(seconds, 4) for seconds in answer.times_s],
            "rows": answer.rows,
        }
    if step.is_read:
        llm.generate(prompt, SamplingParams(1), "exact")
    return {"num_tokens": len(prompt), "reused": reused, "designs": found} if found else None


def designs(rows: list[int]) -> Iterator[str]:
    """Yield the names of all designs."""
    yield from ("none", "at once")
    for kind in ("importance", "correction", "causal"):
        yield from (f"{kind}:{each}" for each in rows)


def given(llm: LLM, prompt: TokenArray, answer: TokenArray, design: str) -> tuple[Answer | None, int]:
    """Give `answer` by `design`; returns with it how many tokens were copied. None where nothing is to be repaired."""
    kind, _, rows = design.partition(":")
    sampling = SamplingParams(len(answer), ignore_eos=True)
    if kind in ("none", "at once", "causal"):
        rules = RepairRules(RepairTime.AFTER, rows_per_step=int(rows or 0))
        choice = {} if kind == "at once" else {"selection": "none", "correction": "none"}
        served = llm.dictate(prompt, answer, sampling, repair=rules, **choice)
        copied = served.report.shifted_tokens + served.report.recomputed_tokens
        healed = served.report.repair.healed_tokens if served.report.repair is not None else 0
        again = served.report.recomputed_tokens + healed
        return (Answer(served.logits, served.cpu_times_s, again) if served.report.spans else None), copied
    policy = Scheduled(ratio=0.1, rows=int(rows or _ALL_ROWS), corrects_first=kind == "correction")
    engine = llm.engine
    request = engine.builder.build(prompt, RequestOptions(sampling, selection=policy, repair="after"))
    kv = engine.manager.begin(request, leaves_trace=False)
    try:
        started = time.process_time()
        engine.manager.graft(kv)
        engine.manager.settle(kv)
        if not kv.repairs_after:
            return None, 0
        return stepwise(engine, kv, policy, answer, started), sum(length for _, length in kv.plan.shifted)
    finally:
        engine.manager.abort(kv)


def stepwise(engine: Engine, kv: RequestKV, policy: Scheduled, answer: TokenArray, started: float) -> Answer:
    """Compute the prompt, then one pass of the repair before each token of the answer, as long as there is one."""
    plan = kv.plan
    steps = ScheduledSteps(
        plan,
        policy,
        num_chosen=policy.budget(selection_context(plan, kv.request.token_ids)),
        token_ids=kv.request.token_ids,
        correction=kv.decision.correction,
        scope=Scope(num_layers=engine.adapter.num_layers),
    )
    prefill = AnswerFirst(kv.request.token_ids, kv.kv_indices, steps)
    outcome = None
    while outcome is None:
        outcome = prefill.receive(forward(engine, prefill.next_rows(_ALL_ROWS)))
    repair, logits, times = outcome.repair, [outcome.logits], [time.process_time() - started]
    for number, token in enumerate(answer[:-1].tolist()):
        if repair is not None and repair.receive(forward(engine, repair.next_rows(_ALL_ROWS))) is not None:
            repair = None
        position = plan.num_tokens + number
        engine.manager.grow(kv, position + 1)
        rows = SequenceRows(np.array([token]), np.array([position]), kv.kv_indices, num_logits=1)
        logits.append(forward(engine, rows).logits[-1])
        times.append(time.process_time() - started)
    again = sum(length for _, length in steps.work().recomputed_runs)
    return Answer(torch.stack(logits), tuple(times), again)


def forward(engine: Engine, rows: SequenceRows) -> SequenceOutput:
    """Run the rows of one prompt."""
    return engine.adapter.forward([rows])[0]


def summary(rows: list[dict], args: argparse.Namespace) -> dict[str, object]:
    """Return, per suite and over all, each design's divergence and times."""
    found: dict[str, object] = {}
    for suite in (*args.suites, "all"):
        mine = [row["designs"] for row in rows if suite in (row["suite"], "all")]
        if mine:
            drawn = np.random.default_rng(args.seed).integers(len(mine), size=(RESAMPLES, len(mine)))
            found[suite] = {design: figures([row[design] for row in mine], mine, drawn) for design in mine[0]}
    return found


def figures(answers: list[dict], mine: list[dict], drawn: NDArray[np.int64]) -> dict[str, object]:
    """Return the figures of one design over requests `mine`."""
    kl = np.array([each["kl"] for each in answers])
    seconds = np.array([each["seconds"] for each in answers])
    least = np.array([row["none"]["seconds"] for row in mine])
    means = kl[:, 1:].mean(1)
    return {
        "n": len(answers),
        "kl_2_to_8": float(kl[:, 1:8].mean()),
        "kl_2_to_32": float(means.mean()),
        "kl_2_to_32_ci": interval(means, drawn),
        "rows": float(np.mean([each["rows"] for each in answers])),
        "time_of_token": {str(each): float(np.median(seconds[:, each - 1] / least[:, each - 1])) for each in _TIMED},
    }


if __name__ == "__main__":
    sys.exit(main())
