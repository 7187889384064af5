"""Table T1: time to first token by length, cold, missed, grafted and hit, beside what the operations allow."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvgraft.bench.deadline import Deadline
from kvgraft.bench.ttft import Draws, GraftAs, RoundShape, measure_round
from kvgraft.engine import LLM
from kvgraft.errors import ConfigError

from .measured import MeasuredTable
from .random_weights import lengthened
from .settings import CLOCKS, RoundsSettings, clock_option, minutes_option, option
from .statistics import median, percentile, ratio_of_medians, with_interval

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvgraft.bench.journal import Journal
    from kvgraft.bench.timed_answer import TimedAnswer
    from kvgraft.bench.ttft import TtftRound

    Row = dict[str, Any]

WAYS = {"none": GraftAs("none", "none"), "default": GraftAs()}
"""Policies with columns for their hits: nothing computed again, and what the engine does if nothing is set."""


@dataclass(frozen=True)
class LengthSettings(RoundsSettings):
    """Rows and rounds of the table; every round has every mode once."""

    lengths: tuple[int, ...] = option((1024, 2048, 4096, 8000), "prompt lengths")
    rounds: int = option(3, "rounds per length", least=1)
    clock: str = clock_option()
    minutes: float = minutes_option()
    random_context: int = option(
        0,
        "take random weights of the model's shape and a context of so many tokens, for lengths beyond the model's",
        least=0,
    )


def measure(llm: LLM, settings: LengthSettings, journal: Journal, advance: Callable[[], object]) -> list[Row]:
    """Return a row per length that was measured; `advance` is called once per round."""
    deadline = Deadline.after(60 * settings.minutes or math.inf)
    _warm_up(llm, settings)
    for length in settings.lengths:
        for number in range(settings.rounds):
            if (length, number) not in journal and not deadline.is_over:
                draws = Draws(llm, (settings.seed, length, number))
                found = measure_round(llm, draws, RoundShape(length, settings.shift), tuple(WAYS.values()))
                journal.add({"length": length, "round": number, **_record(found)})
            advance()
    measured = {length: list(journal.under(length)) for length in settings.lengths}
    return [_row(length, records, settings) for length, records in measured.items() if records]


def prepare(llm: LLM, settings: LengthSettings) -> LLM:
    """Return the model, or one of random weights that takes longer prompts.

    Raises:
        ConfigError: A prompt is too long for it.
    """
    longest = max(settings.lengths)
    if settings.random_context:
        loaded = lengthened(llm.loaded, settings.random_context, settings.seed)
        # Slots of a document, of a prompt that has it and of another one.
        config = replace(llm.config, num_slots=3 * longest + settings.shift, max_model_len=0)
        llm.close()
        llm = LLM(loaded, config)
    if longest >= llm.max_model_len:
        raise ConfigError(
            f"--lengths has {longest}, and {llm.loaded.name} takes {llm.max_model_len} tokens; give shorter ones, a larger "
            "--num-slots, or --random-context for a model with random weights"
        )
    return llm


def _warm_up(llm: LLM, settings: LengthSettings) -> None:
    """Run each path once, so that the first round does not pay for first calls."""
    shape = RoundShape(settings.shift + 256, settings.shift)
    measure_round(llm, Draws(llm, (settings.seed, 0)), shape, tuple(WAYS.values()))


def _record(found: TtftRound) -> Row:
    """Milliseconds by clock, and tokens, of a round."""
    record: Row = {
        "cold_ms": _ms(found.cold),
        "miss_ms": _ms(found.miss),
        "miss_lookup_ms": found.miss.report.timings_ms["lookup"],
        "repeat_ms": _ms(found.repeat),
        "repeat_exact_tokens": int(found.repeat.report.exact_tokens),
    }
    for name, graft in zip(WAYS, found.grafts, strict=True):
        report = graft.report
        record |= {
            f"{name}_ms": _ms(graft),
            f"{name}_reused_tokens": int(report.reused_tokens),
            f"{name}_computed_tokens": int(report.computed_tokens),
            f"{name}_bound_ratio": report.full_flops / report.computed_flops,
        }
    return record


def _ms(answer: TimedAnswer) -> dict[str, float]:
    """Milliseconds to the first token by clock."""
    times = zip(CLOCKS, (answer.times_s, answer.cpu_times_s), strict=True)
    return {clock: round(1e3 * seconds[0], 3) for clock, seconds in times}


def _row(length: int, records: Sequence[Row], settings: LengthSettings) -> Row:
    """Medians over the rounds, and ratios of medians with their intervals."""
    seed = settings.seed

    def column(name: str) -> list[float]:
        return [float(record[name]) for record in records]

    def times(name: str) -> list[float]:
        return [float(record[f"{name}_ms"][settings.clock]) for record in records]

    def of(name: str) -> Row:
        return {f"{name}_ms": median(times(name)), f"{name}_p95_ms": percentile(times(name), 95)}

    row: Row = {
        "length": length,
        "rounds": len(records),
        **of("cold"),
        **of("miss"),
        "miss_lookup_ms": median(column("miss_lookup_ms")),
        **of("repeat"),
        "repeat_exact_tokens": _whole(column("repeat_exact_tokens")),
        **with_interval("repeat_speedup_ratio", ratio_of_medians, [times("cold"), times("repeat")], seed),
    }
    for name in WAYS:
        speedup = with_interval(f"{name}_speedup_ratio", ratio_of_medians, [times("cold"), times(name)], seed)
        row |= {
            **of(name),
            f"{name}_reused_tokens": _whole(column(f"{name}_reused_tokens")),
            f"{name}_computed_tokens": _whole(column(f"{name}_computed_tokens")),
            **speedup,
            f"{name}_bound_ratio": median(column(f"{name}_bound_ratio")),
        }
    # What the default repairs after the first token is in its bound, and not in its time.
    row["none_of_bound_share"] = row["none_speedup_ratio"] / row["none_bound_ratio"]
    return row


def _whole(values: Sequence[float]) -> int:
    return int(np.median(values))


TABLE = MeasuredTable(
    "length",
    "Time to first token by length",
    "For each length, in turns: nothing known and reuse off (cold), nothing known and reuse on (miss), the document known at "
    "another position, with nothing computed again (none) and as the engine does by default (default), and the very same "
    "prompt again (repeat), which bounds what reuse can reach.",
    LengthSettings,
    ("length", "round"),
    measure,
    prepare,
)
