"""How soon tokens come with `reuse="verified"`: provisional ones beside a plain graft's, verified ones beside full prefill's.

    python benchmarks/record.py verified-ttft -- python benchmarks/verified_ttft.py --plot docs/images/verified.png

Code of the standard library is read once from position 0; then a prompt that has other text before it is answered, in
turns and each from the same cache, by full prefill, by a graft with nothing recomputed, as drafts are made, by a graft as
configured, and verified with provisional tokens shown. Times are those of a client, from the request on; medians of rounds.
Steps are as long as in a server. `--clock cpu` counts what the process computes instead: for machines that do other work.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.config import EngineConfig
from kvgraft.demo.documents import stdlib_modules
from kvgraft.engine import SamplingParams
from kvgraft.engine.core import Engine
from kvgraft.engine.requests.options import RequestOptions
from kvgraft.types import ReuseMode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.axes import Axes

    from kvgraft.engine.requests.request import Request, RequestOutput
    from kvgraft.types import TokenArray

HEAD_TOKENS = 200
STEP_S = 0.25
"""Longest prefill of a step, as `kvgraft serve` has it."""
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
SIDES = ("off", "cheap graft", "graft", "verified")
Row = dict[str, float | int]


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """One answer by a client's clock.

    Attributes:
        output: The result.
        provisional_s: Until the first provisional token; None if there was none.
        first_s: Until the first token that stays.
        last_s: Until the last one.
    """

    output: RequestOutput
    provisional_s: float | None
    first_s: float
    last_s: float


def answer(engine: Engine, request: Request, clock: Callable[[], float] = time.perf_counter) -> Answer:
    """Run one request alone."""
    started = clock()
    engine.add(replace(request, arrival=time.perf_counter()))
    provisional_s = first_s = None
    while True:
        for event in engine.step():
            if event.part is None:
                raise SystemExit(f"a request failed: {event.error}")
            passed = clock() - started
            if event.part.is_provisional:
                provisional_s = provisional_s or passed
                continue
            first_s = first_s or passed
            if event.part.output is not None:
                return Answer(event.part.output, provisional_s, first_s, passed)


class Measurement:
    """Documents of one length and everything that is asked about them."""

    def __init__(
        self, engine: Engine, source: TokenArray, tokens: int, rng: random.Random, clock: Callable[[], float]
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._source = source
        self._sampling = SamplingParams(tokens, ignore_eos=True)
        self._rng = rng

    def round(self, length: int) -> dict[str, Answer]:
        """Ask every side for the same prompt, in an order that is drawn, each with only the document known."""
        document, head = self._cut(length - HEAD_TOKENS), self._cut(HEAD_TOKENS)
        prompt = np.concatenate([head, document])
        build, sampling = self._engine.builder.build, self._sampling
        options = {
            "off": RequestOptions(sampling, ReuseMode.OFF),
            "cheap graft": RequestOptions(sampling, ReuseMode.GRAFT, selection="none", correction="none"),
            "graft": RequestOptions(sampling, ReuseMode.GRAFT),
            "verified": RequestOptions(sampling, ReuseMode.VERIFIED, provisional=True),
        }
        asked = {side: build(prompt, each) for side, each in options.items()}
        known = RequestOptions(replace(sampling, max_new_tokens=1), ReuseMode.OFF)
        answers = {}
        for side in self._rng.sample(SIDES, len(SIDES)):
            self._engine.reset()
            answer(self._engine, build(document, known))
            answers[side] = answer(self._engine, asked[side], self._clock)
        if answers["verified"].output.token_ids != answers["off"].output.token_ids:
            raise SystemExit("a verified answer is not full prefill's")
        if not answers["cheap graft"].output.report.shifted_tokens:
            raise SystemExit("nothing was grafted; choose another --model")
        return answers

    def _cut(self, length: int) -> TokenArray:
        start = self._rng.randrange(len(self._source) - length)
        return self._source[start : start + length]


def summary(length: int, rounds: Sequence[dict[str, Answer]]) -> Row:
    """Medians of one length; ratios are medians of the rounds' ratios."""

    def median(read: Callable[[dict[str, Answer]], float]) -> float:
        return statistics.median(map(read, rounds))

    def first_shown(answers: dict[str, Answer]) -> float:
        return answers["verified"].provisional_s or answers["verified"].first_s

    healing = [found for answers in rounds if (found := answers["verified"].output.report.healing) is not None]
    return {
        "tokens": length,
        "rounds": len(rounds),
        **{f"{side.replace(' ', '_')}_first_s": median(lambda r, s=side: r[s].first_s) for side in SIDES[:3]},  # type: ignore[misc]
        "provisional_first_s": median(first_shown),
        "verified_first_s": median(lambda r: r["verified"].first_s),
        "off_last_s": median(lambda r: r["off"].last_s),
        "verified_last_s": median(lambda r: r["verified"].last_s),
        "provisional_over_cheap_graft": median(lambda r: first_shown(r) / r["cheap graft"].first_s),
        "provisional_over_graft": median(lambda r: first_shown(r) / r["graft"].first_s),
        "provisional_over_off": median(lambda r: first_shown(r) / r["off"].first_s),
        "verified_first_over_off": median(lambda r: r["verified"].first_s / r["off"].first_s),
        "verified_last_over_off": median(lambda r: r["verified"].last_s / r["off"].last_s),
        "healed_tokens": sum(found.healed_tokens for found in healing),
        "drafted_tokens": sum(found.drafted_tokens for found in healing),
        "retracted_tokens": sum(found.retracted_tokens for found in healing),
    }


def source_tokens(engine: Engine, wanted: int) -> TokenArray:
    """Tokens of the standard library's sources, at least `wanted` of them."""
    modules = stdlib_modules(wanted=lambda name: name.split(".")[0] in ("asyncio", "email", "json", "logging"))
    parts: list[TokenArray] = []
    for module in modules:
        parts.append(engine.builder.tokenize(module.source, add_special_tokens=False))
        if sum(map(len, parts)) >= wanted:
            break
    return np.concatenate(parts)


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draw times over the length of the prompt."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), dpi=130, layout="constrained")
    left, right = figure.subplots(1, 2)
    first = {
        "off_first_s": ("full prefill", "#777777", "-"),
        "graft_first_s": ("graft as configured", "#1f77b4", "-"),
        "cheap_graft_first_s": ("graft, nothing recomputed", "#d95f02", "-"),
        "provisional_first_s": ("verified: first provisional token", "#1b9e77", "--"),
        "verified_first_s": ("verified: first verified token", "#1b9e77", "-"),
    }
    last = {
        "off_last_s": ("full prefill: last token", "#777777", "-"),
        "verified_last_s": ("verified: last verified token", "#1b9e77", "-"),
    }
    _lines(left, rows, first, "first token, seconds")
    _lines(right, rows, last, "whole answer, seconds")
    left.set_yscale("log")
    right.set_ylim(bottom=0)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, format="png")


def _lines(axes: Axes, rows: Sequence[Row], lines: dict[str, tuple[str, str, str]], title: str) -> None:
    for name, (label, colour, style) in lines.items():
        values = [row[name] for row in rows]
        axes.plot([row["tokens"] for row in rows], values, style, marker="o", color=colour, label=label)
    axes.set_xlabel("prompt tokens")
    axes.set_title(title, fontsize=10, loc="left")
    axes.grid(visible=True, alpha=0.25)
    axes.legend(frameon=False, fontsize=8)


def markdown(rows: Sequence[Row]) -> str:
    """Lay the rows out."""
    lines = [
        "| tokens | full prefill | graft | cheap graft | provisional | / cheap graft | first verified | last: full prefill "
        "| last: verified | ratio | retracted |",
        "|---" * 11 + "|",
    ]
    lines += [
        f"| {row['tokens']:,} | {row['off_first_s']:.2f} s | {row['graft_first_s']:.2f} s "
        f"| {row['cheap_graft_first_s']:.3f} s | {row['provisional_first_s']:.3f} s "
        f"| {row['provisional_over_cheap_graft']:.2f} | {row['verified_first_s']:.2f} s | {row['off_last_s']:.2f} s "
        f"| {row['verified_last_s']:.2f} s | {row['verified_last_over_off']:.2f} "
        f"| {row['retracted_tokens']} of {row['drafted_tokens']} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> int:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="graft-tiny")
    parser.add_argument("--lengths", default="1024,2048,4096,8000")
    parser.add_argument("--tokens", type=int, default=16, help="tokens per answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="write a PNG")
    parser.add_argument("--markdown", action="store_true", help="print a table instead of JSON")
    args = parser.parse_args()
    lengths = [int(length) for length in args.lengths.split(",")]
    engine = Engine(args.model, EngineConfig(num_slots=3 * max(lengths) + 1_000), max_step_s=STEP_S)
    rng = random.Random(args.seed)
    measured = Measurement(engine, source_tokens(engine, 4 * max(lengths)), args.tokens, rng, CLOCKS[args.clock])
    measured.round(lengths[0])  # the first passes allocate
    rows: list[Row] = []
    for length in lengths:
        rounds = []
        for number in range(args.rounds):
            rounds.append(measured.round(length))
            print(f"{length} tokens, round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
        rows.append(summary(length, rounds))
    engine.close()
    if args.plot:
        draw(rows, f"{Path(args.model).name}, answers of {args.tokens} tokens, medians of {args.rounds}", args.plot)
    names = ("tokens", "rounds", "clock", "seed")
    settings = {"model": Path(args.model).name, **{name: getattr(args, name) for name in names}}
    print(markdown(rows) if args.markdown else json.dumps({"settings": settings, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
