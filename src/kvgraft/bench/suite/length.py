"""Table T1: time to first token by length, cold, missed, grafted and hit, beside what the operations allow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvgraft.bench.suite.statistics import array_median, median, percentile, ratio_of_medians, with_interval
from kvgraft.bench.ttft import Draws, GraftAs, measure_round

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvgraft.bench.journal import Journal
    from kvgraft.bench.ttft import TtftRound
    from kvgraft.engine import LLM, RequestOutput

    Row = dict[str, Any]

TABLE, TITLE = "length", "Time to first token by length"
KEY = ("length", "round")
WAYS = {"none": GraftAs("none", "none"), "default": GraftAs()}
"""Policies whose hits are columns: nothing computed again, and what the engine does if nothing is set."""


@dataclass(frozen=True, slots=True)
class LengthSettings:
    """What is measured.

    Attributes:
        lengths: Prompt tokens of the rows.
        shift: New tokens in front of the document.
        rounds: Rounds per row; every round has every mode once.
        seed: Of the tokens and the intervals.
        random_context: Longest prompt of a model with random weights that stands in for the named one; 0 for the model
            itself.
    """

    lengths: tuple[int, ...] = (1024, 2048, 4096, 8000)
    shift: int = 200
    rounds: int = 3
    seed: int = 0
    random_context: int = 0


def measure(llm: LLM, settings: LengthSettings, journal: Journal, advance: Callable[[], object]) -> list[Row]:
    """Return a row per length; `advance` is called once per round."""
    _warm_up(llm, settings)
    rows = []
    for length in settings.lengths:
        for number in range(settings.rounds):
            if (length, number) not in journal:
                draws = Draws(llm, (settings.seed, length, number))
                told = _told(measure_round(llm, draws, length, settings.shift, tuple(WAYS.values())))
                journal.add({"length": length, "round": number, **told})
            advance()
        rows.append(_row(length, list(journal.under(length)), settings.seed))
    return rows


def _warm_up(llm: LLM, settings: LengthSettings) -> None:
    """Run each path once, so that the first round does not pay for first calls."""
    length = settings.shift + 256
    measure_round(llm, Draws(llm, (settings.seed, 0)), length, settings.shift, tuple(WAYS.values()))


def _told(found: TtftRound) -> Row:
    """Milliseconds and tokens of a round."""
    told: Row = {
        "cold_ms": _ms(found.cold),
        "miss_ms": _ms(found.miss),
        "miss_lookup_ms": found.miss.report.timings_ms["lookup"],
        "repeat_ms": _ms(found.repeat),
        "repeat_exact_tokens": int(found.repeat.report.exact_tokens),
    }
    for name, graft in zip(WAYS, found.grafts, strict=True):
        report = graft.report
        told |= {
            f"{name}_ms": _ms(graft),
            f"{name}_reused_tokens": int(report.exact_tokens + report.shifted_tokens),
            f"{name}_computed_tokens": int(report.computed_tokens),
            f"{name}_bound_ratio": report.full_flops / report.computed_flops,
        }
    return told


def _ms(output: RequestOutput) -> float:
    return round(1e3 * output.ttft_s, 3)


def _row(length: int, records: Sequence[Row], seed: int) -> Row:
    """Medians over the rounds, and ratios of medians with their intervals."""

    def column(name: str) -> list[float]:
        return [float(record[name]) for record in records]

    def of(name: str) -> Row:
        return {f"{name}_ms": median(column(f"{name}_ms")), f"{name}_p95_ms": percentile(column(f"{name}_ms"), 95)}

    overhead = [100 * (record["miss_ms"] / record["cold_ms"] - 1) for record in records]
    row: Row = {
        "length": length,
        "rounds": len(records),
        **of("cold"),
        **of("miss"),
        **with_interval("miss_overhead_percent", array_median, [overhead], seed),
        "miss_lookup_ms": median(column("miss_lookup_ms")),
        **of("repeat"),
        "repeat_exact_tokens": _whole(column("repeat_exact_tokens")),
        **with_interval("repeat_speedup_ratio", ratio_of_medians, [column("cold_ms"), column("repeat_ms")], seed),
    }
    for name in WAYS:
        speedup = with_interval(
            f"{name}_speedup_ratio", ratio_of_medians, [column("cold_ms"), column(f"{name}_ms")], seed
        )
        bound = median(column(f"{name}_bound_ratio"))
        reached = speedup[f"{name}_speedup_ratio"]
        row |= {
            **of(name),
            f"{name}_reused_tokens": _whole(column(f"{name}_reused_tokens")),
            f"{name}_computed_tokens": _whole(column(f"{name}_computed_tokens")),
            **speedup,
            f"{name}_bound_ratio": bound,
            f"{name}_of_bound_share": None if reached is None or bound is None else reached / bound,
        }
    return row


def _whole(values: Sequence[float]) -> int:
    return int(np.median(values))
