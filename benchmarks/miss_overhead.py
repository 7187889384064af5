"""What a miss costs: prompts of which nothing is known, with reuse on and off, one of each per pair and in alternating order.

    python benchmarks/record.py miss-overhead -- python benchmarks/miss_overhead.py --journal runs/miss.jsonl

Every prompt is random tokens of its own, on one engine that knows as many documents as fit and has their K/V where they push
one another out. Answers of one token are timed to that token, on the processor's clock, which counts this process alone; a
pair stands or falls together with what the machine does beside it. Each pair is a line of `--journal`, where a run that was
cut off goes on. Prints medians over the pairs of time with reuse over time without, minus 1, in per cent, with 95 % bootstrap
intervals.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from kvgraft.bench.journal import Journal
from kvgraft.bench.timed_answer import timed_answer
from kvgraft.bench.ttft import ONE_TOKEN, Draws
from kvgraft.engine import LLM
from kvgraft.types import ReuseMode
from suite.statistics import array_median, median, with_interval

Row = dict[str, Any]


def measured(llm: LLM, draws: Draws, length: int, *, is_miss_first: bool) -> Row:
    """Time one prompt in either mode; both are new to the engine."""
    row: Row = {}
    for reuse in (ReuseMode.GRAFT, ReuseMode.OFF) if is_miss_first else (ReuseMode.OFF, ReuseMode.GRAFT):
        answer = timed_answer(llm, draws.tokens(length), ONE_TOKEN, reuse)
        report = answer.report
        if report.computed_tokens != length:
            sys.exit(f"{length - report.computed_tokens} tokens of a prompt that is new were reused")
        name = "miss" if reuse is ReuseMode.GRAFT else "cold"
        row |= {f"{name}_ms": 1e3 * answer.cpu_times_s[0], f"{name}_lookup_ms": report.timings_ms["lookup"]}
    return row


def summary(length: int, rows: list[Row], seed: int) -> Row:
    """Medians of one length, and the overhead with its interval."""
    overhead = [100 * (row["miss_ms"] / row["cold_ms"] - 1) for row in rows]
    return {
        "length": length,
        "pairs": len(rows),
        "cold_ms": median([row["cold_ms"] for row in rows]),
        "miss_ms": median([row["miss_ms"] for row in rows]),
        **with_interval("miss_overhead_percent", array_median, [overhead], seed),
        "miss_lookup_ms": median([row["miss_lookup_ms"] for row in rows]),
        "cold_lookup_ms": median([row["cold_lookup_ms"] for row in rows]),
    }


def main() -> int:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1_024, 2_048])
    parser.add_argument("--pairs", type=int, default=120, help="pairs per length")
    parser.add_argument(
        "--num-slots", type=int, default=16_384, help="room for what is known; all of it is filled first"
    )
    parser.add_argument("--journal", type=Path, help="file that keeps what was measured; a run goes on there")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    settings = {name: value for name, value in vars(args).items() if name != "journal"}
    decides = {name: value for name, value in settings.items() if name not in ("lengths", "pairs")}
    journal = Journal(args.journal, decides, ("length", "pair"))
    llm = LLM(args.model, dtype=args.dtype, num_slots=args.num_slots)
    draws = Draws(llm, (args.seed, len(journal)))
    for _ in range(args.num_slots // max(args.lengths) + 1):
        llm.generate(draws.tokens(max(args.lengths)), ONE_TOKEN)
    for number in range(args.pairs):
        for length in args.lengths:
            if (length, number) not in journal:
                pair = measured(llm, draws, length, is_miss_first=bool(number % 2))
                journal.add({"length": length, "pair": number, **pair})
        print(f"\rpair {number + 1} of {args.pairs}", end="", file=sys.stderr)
    llm.close()
    print(file=sys.stderr)
    found = [summary(length, list(journal.under(length)), args.seed) for length in args.lengths]
    print(json.dumps({"settings": settings, "rows": found}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
