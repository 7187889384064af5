"""Hold answers of `reuse="verified"` against full prefill's: mixed prompts, batches, aborts and preemption in a small pool.

    python benchmarks/record.py verified-graft-tiny -- python benchmarks/verified.py --state /tmp/verified.jsonl
    python benchmarks/verified.py ../shared/data/dev/{rag,xinstr,mturn,adversarial.pairs} --model DIRECTORY --tokens 12

Every prompt is asked with `verified` and with `off` on the same engine, greedily or drawn with a seed, while other requests
run, some of which are cancelled at any stage and any of which loses its slots at random. Each comparison is a line of
`--state`; a run that was cut off goes on there. Prints one JSON object; exit code 1 if an answer differs or anything failed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.config import EngineConfig
from kvgraft.engine import SamplingParams
from kvgraft.engine.core import Engine
from kvgraft.engine.idle.scoring import score
from kvgraft.engine.requests.options import RequestOptions
from kvgraft.types import ReuseMode
from mixed_prompts import BUILTIN, mixed_prompts

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvgraft.engine.requests.request import Request, RequestOutput, StreamPart
    from mixed_prompts import MixedPrompt

Row = dict[str, object]
_CHECK_EVERY = 50


@dataclass(slots=True, eq=False)
class Asked:
    """A request that runs.

    Attributes:
        index: Number of its prompt.
        side: `verified`, `off` or `doomed`.
        steps_left: Steps until it is cancelled; None for never.
        tokens: Verified tokens so far.
        provisional: Provisional ones that are outstanding.
    """

    index: int
    side: str
    request: Request
    steps_left: int | None = None
    tokens: list[int] = field(default_factory=list)
    provisional: deque[int] = field(default_factory=deque)

    def take(self, part: StreamPart) -> str | None:
        """Follow the stream as a client does; says what is wrong with it, if anything."""
        problem = None
        for _ in range(part.num_retracted):
            if not self.provisional:
                problem = "more tokens are retracted than are outstanding"
                break
            self.provisional.pop()
        if part.is_provisional:
            self.provisional.append(part.token_id)
            return problem if self.request.provisional else "a provisional token that was not asked for"
        if self.provisional and self.provisional[0] == part.token_id:
            self.provisional.popleft()
        else:
            self.provisional.clear()
        self.tokens.append(part.token_id)
        return problem


class Comparison:
    """All prompts on one engine.

    Attributes:
        rows: What was compared, by number of prompt.
        counts: Aborts, preemptions and the like.
        problems: What failed.
    """

    def __init__(self, engine: Engine, prompts: list[MixedPrompt], args: argparse.Namespace) -> None:
        self.rows: dict[int, Row] = {}
        self.counts: Counter[str] = Counter()
        self.problems: Counter[str] = Counter()
        self._engine = engine
        self._prompts = prompts
        self._args = args
        self._rng = random.Random(args.seed)
        self._open: dict[str, Asked] = {}
        self._answers: dict[int, dict[str, RequestOutput]] = {}

    def run(self, indices: Iterable[int], state: Path | None) -> None:
        """Ask the prompts of these numbers; no new ones are asked when the time is up."""
        deadline = time.monotonic() + 60 * self._args.minutes
        waiting = iter(indices)
        queue: deque[Asked] = deque()
        steps = 0
        while True:
            while len(self._open) < self._args.concurrency:
                if not queue:
                    index = next(waiting, None) if time.monotonic() < deadline else None
                    if index is None:
                        break
                    queue.extend(self._asked(index))
                self._add(queue.popleft())
            if not self._open:
                break
            self._disturb()
            for event in self._engine.step():
                self._take(event.request_id, event.part, event.error, state)
            steps += 1
            if steps % _CHECK_EVERY == 0:
                self._engine.check()
                print(f"\r{len(self.rows):,} prompts, {steps:,} steps", end="", file=sys.stderr, flush=True)
        self._engine.check()
        if held := self._engine.space.usage().request:
            self.problems[f"{held} slots have no holder"] += 1

    def _asked(self, index: int) -> list[Asked]:
        """The requests of one prompt: the verified one, perhaps one that will be cancelled, and full prefill's."""
        args, rng = self._args, random.Random(f"{self._args.seed} {index}")
        builder = self._engine.builder
        token_ids = builder.tokenize(self._prompts[index].text)[: rng.randint(args.shortest, args.longest)]
        is_sampled = rng.random() < args.sampled
        sampling = SamplingParams(
            args.tokens, temperature=0.8 if is_sampled else 0.0, seed=index if is_sampled else None, ignore_eos=True
        )
        verified = builder.build(token_ids, RequestOptions(sampling, ReuseMode.VERIFIED))
        asked = [Asked(index, "verified", replace(verified, provisional=rng.random() < 0.5))]
        if rng.random() < args.aborts:
            doomed = builder.build(
                token_ids, RequestOptions(sampling, rng.choice((ReuseMode.VERIFIED, ReuseMode.GRAFT)))
            )
            asked.append(Asked(index, "doomed", doomed, steps_left=rng.randint(0, 12)))
        asked.append(Asked(index, "off", builder.build(token_ids, RequestOptions(sampling, ReuseMode.OFF))))
        return asked

    def _add(self, asked: Asked) -> None:
        self._engine.add(replace(asked.request, arrival=time.perf_counter()))
        self._open[asked.request.request_id] = asked

    def _disturb(self) -> None:
        """Cancel requests that are due, and take the slots of one."""
        for name, asked in list(self._open.items()):
            if asked.steps_left is None:
                continue
            asked.steps_left -= 1
            if asked.steps_left < 0:
                self._engine.cancel(name)
                del self._open[name]
                self.counts["aborts"] += 1
        scheduler = self._engine.scheduler
        if scheduler.running and self._rng.random() < self._args.preemptions:
            scheduler.preempt(self._rng.choice(scheduler.running))

    def _take(self, name: str, part: StreamPart | None, error: Exception | None, state: Path | None) -> None:
        asked = self._open[name]
        if part is None:
            self.problems[f"{asked.side}: {error}"] += 1
            del self._open[name]
            return
        problem = asked.take(part)
        if part.output is not None:
            del self._open[name]
            if tuple(asked.tokens) != part.output.token_ids or asked.provisional:
                problem = problem or "the stream does not add up to the answer"
            self._ended(asked, part.output, state)
        if problem:
            self.problems[f"{asked.side}: {problem}"] += 1

    def _ended(self, asked: Asked, output: RequestOutput, state: Path | None) -> None:
        self.counts["preemptions"] += output.num_preemptions
        if asked.side == "doomed":
            self.counts["ended before their abort"] += 1
            return
        answers = self._answers.setdefault(asked.index, {})
        answers[asked.side] = output
        if len(answers) == 2:
            row = self._compared(asked.index, asked.request, **self._answers.pop(asked.index))
            self.rows[asked.index] = row
            if state is not None:
                with state.open("a") as file:
                    file.write(json.dumps(row) + "\n")

    def _compared(self, index: int, request: Request, *, verified: RequestOutput, off: RequestOutput) -> Row:
        healing = verified.report.healing
        row: Row = {
            "index": index,
            "kind": self._prompts[index].kind,
            "tokens": len(request.token_ids),
            "is_sampled": request.sampling.temperature > 0,
            "is_equal": verified.token_ids == off.token_ids,
            "answer_tokens": len(off.token_ids),
            "copied": sum(span.length for span in healing.spans) if healing else 0,
            "drafted": healing.drafted_tokens if healing else 0,
            "retracted": healing.retracted_tokens if healing else 0,
            "preemptions": verified.num_preemptions,
        }
        if not row["is_equal"]:
            row["first_difference"] = self._difference(request, verified, off)
        return row

    def _difference(self, request: Request, verified: RequestOutput, off: RequestOutput) -> Row:
        """Where two answers part, and by how much full prefill prefers its own token there: near 0 is rounding."""
        pairs = zip(verified.token_ids, off.token_ids, strict=False)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if place is None:
            return {"at": min(len(verified.token_ids), len(off.token_ids)), "why": "one is shorter"}
        alone = replace(request, reuse=ReuseMode.OFF, provisional=False)
        tokens = np.asarray(off.token_ids[: place + 1], np.int64)
        engine = self._engine
        logits = score(engine.adapter, engine.manager, alone, tokens, max_rows=engine.config.max_rows).logits[-1]
        ours, theirs = verified.token_ids[place], off.token_ids[place]
        return {"at": place, "verified": ours, "off": theirs, "margin": float(logits[theirs] - logits[ours])}


def summary(rows: Iterable[Row]) -> Row:
    """Sum comparisons up."""
    rows = list(rows)
    drafted, retracted = (sum(int(str(row[name])) for row in rows) for name in ("drafted", "retracted"))
    with_drafts = sum(bool(row["drafted"]) for row in rows)
    return {
        "prompts": len(rows),
        "equal": sum(bool(row["is_equal"]) for row in rows),
        "sampled": sum(bool(row["is_sampled"]) for row in rows),
        "with_graft": sum(bool(row["copied"]) for row in rows),
        "with_drafts": with_drafts,
        "with_drafts_share": round(with_drafts / max(1, len(rows)), 3),
        "drafted_tokens": drafted,
        "retracted_tokens": retracted,
        "retracted_share": round(retracted / max(1, drafted), 3),
        "prompts_with_a_retraction": sum(bool(row["retracted"]) for row in rows),
        "preempted": sum(bool(row["preemptions"]) for row in rows),
    }


def kept(state: Path | None) -> dict[int, Row]:
    """What an earlier run has compared."""
    if state is None or not state.exists():
        return {}
    rows = [json.loads(line) for line in state.read_text().splitlines()]
    return {row["index"]: row for row in rows}


def main() -> int:
    """Compare and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packs", nargs="*", default=list(BUILTIN), help="request packs or names such as builtin:rag")
    parser.add_argument("--model", default="graft-tiny")
    parser.add_argument("--prompts", type=int, default=1_000)
    parser.add_argument("--tokens", type=int, default=12, help="tokens per answer")
    parser.add_argument("--shortest", type=int, default=300, help="a prompt is cut at a length between this")
    parser.add_argument("--longest", type=int, default=900, help="and this; shorter ones stay whole")
    parser.add_argument("--sampled", type=float, default=0.25, help="share of prompts answered by drawing with a seed")
    parser.add_argument(
        "--aborts", type=float, default=0.2, help="share of prompts beside which a request is cancelled"
    )
    parser.add_argument(
        "--preemptions", type=float, default=0.02, help="how likely a request loses its slots in a step"
    )
    parser.add_argument("--concurrency", type=int, default=6)
    parser.add_argument("--num-slots", type=int, default=3_600)
    parser.add_argument("--max-rows", type=int, default=256, help="rows of a forward pass: prompts run in such pieces")
    parser.add_argument("--minutes", type=float, default=60.0, help="ask no new prompts after this")
    parser.add_argument("--state", type=Path, help="file that keeps what was compared; a run goes on there")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    prompts = mixed_prompts(args.packs, args.prompts, args.seed)
    config = EngineConfig(num_slots=args.num_slots, max_rows=args.max_rows, max_running=args.concurrency)
    engine = Engine(args.model, config)
    comparison = Comparison(engine, prompts, args)
    comparison.rows.update(kept(args.state))
    started = time.perf_counter()
    comparison.run([index for index in range(len(prompts)) if index not in comparison.rows], args.state)
    rows = list(comparison.rows.values())
    kinds = {str(row["kind"]): None for row in rows}
    settings = {k: v for k, v in vars(args).items() if k != "state"}
    settings |= {"packs": [Path(pack).name for pack in args.packs], "model": Path(args.model).name}
    result = {
        "settings": settings,
        "asked_for": len(prompts),
        **summary(rows),
        "by_kind": {kind: summary(row for row in rows if row["kind"] == kind) for kind in kinds},
        "differences": [row for row in rows if not row["is_equal"]],
        "disturbances": dict(comparison.counts),
        "problems": dict(comparison.problems),
        "seconds": round(time.perf_counter() - started, 1),
    }
    engine.close()
    print(json.dumps(result, indent=1))
    return 1 if result["differences"] or comparison.problems else 0


if __name__ == "__main__":
    sys.exit(main())
