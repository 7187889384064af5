"""Time to first token of a known document at another place, beside a cold prompt and the same text where it stood."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from kvgraft.bench.ttft import Draws, GraftAs, RoundShape, measure_round

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvgraft.bench.deadline import Deadline
    from kvgraft.bench.timed_answer import TimedAnswer
    from kvgraft.bench.ttft import TtftRound
    from kvgraft.engine import LLM

    Row = dict[str, Any]

WAYS = {"none": GraftAs("none", "none"), "before": GraftAs(repair="before"), "after": GraftAs(repair="after")}
"""Grafts: nothing computed again, and the default policy before the first token and after it."""
_GROWTH = 3.0
"""A round of twice the length takes at most so many times longer; what it took decides whether the next one is begun."""


def slots_for(length: int, shift: int) -> int:
    """Return the slots of a document, of a prompt that has it and of another one."""
    return 3 * length + shift


def measure_first_token(
    llm: LLM,
    lengths: Sequence[int],
    *,
    shift: int,
    rounds: int,
    seed: int,
    deadline: Deadline,
    keep: Callable[[Any], object],
) -> dict[str, Any]:
    """Measure a row per length, the shortest first, and name those that there was no time or room for.

    Args:
        llm: The model.
        lengths: Prompt tokens.
        shift: New ones among them, before the document.
        rounds: Per length, fewer where time is short.
        seed: Of the tokens.
        deadline: Nothing is begun that would not be done by then.
        keep: Called with what has been measured after every length.
    """
    rows: list[Row] = []
    skipped: dict[int, str] = {}
    last, last_s = shift, 0.0
    measure_round(llm, Draws(llm, (seed, 0)), RoundShape(shift + 256, shift), tuple(WAYS.values()))
    for length in sorted(lengths):
        expected_s = last_s * max(1.0, _GROWTH * length / (2 * last))
        reason = _room(llm, length, shift) or deadline.reason_to_skip(expected_s)
        if reason:
            skipped[length] = reason
            continue
        found: list[TtftRound] = []
        while len(found) < rounds and (not found or not deadline.reason_to_skip(last_s)):
            left_s = deadline.left_s
            draws = Draws(llm, (seed, length, len(found)))
            found.append(measure_round(llm, draws, RoundShape(length, shift), tuple(WAYS.values())))
            last, last_s = length, left_s - deadline.left_s
        rows.append(_row(length, found))
        keep({"rows": rows, "skipped": skipped})
    return {"rows": rows, "skipped": skipped}


def _room(llm: LLM, length: int, shift: int) -> str:
    longest = llm.max_model_len
    if length >= longest:
        return f"the model takes {longest} tokens"
    wanted, slots = slots_for(length, shift), llm.space.pool.num_slots
    return f"{wanted} K/V slots are needed, and {slots} had room" if wanted > slots else ""


def _row(length: int, rounds: Sequence[TtftRound]) -> Row:
    """Medians over rounds."""

    def ms(answer_of: Callable[[TtftRound], TimedAnswer]) -> float:
        return 1e3 * statistics.median(answer_of(one).ttft_s for one in rounds)

    cold_ms = ms(lambda one: one.cold)
    row: Row = {
        "length": length,
        "rounds": len(rounds),
        "cold_ms": cold_ms,
        "miss_ms": ms(lambda one: one.miss),
        "hit_ms": ms(lambda one: one.hit),
        "repeat_ms": ms(lambda one: one.repeat),
    }
    for index, name in enumerate(WAYS):
        answers = [one.grafts[index] for one in rounds]
        grafted_ms = 1e3 * statistics.median(answer.ttft_s for answer in answers)
        reports = [answer.report for answer in answers]
        row |= {
            f"{name}_ms": grafted_ms,
            f"{name}_second_gap_ms": 1e3 * statistics.median(answer.second_gap_s for answer in answers),
            f"{name}_speedup": cold_ms / grafted_ms,
            f"{name}_bound": statistics.median(report.full_flops / report.computed_flops for report in reports),
            f"{name}_computed_tokens": int(statistics.median(report.computed_tokens for report in reports)),
            f"{name}_copy_ms": statistics.median(report.timings_ms["graft"] for report in reports),
            f"{name}_lookup_ms": statistics.median(report.timings_ms["lookup"] for report in reports),
        }
    later = [one.cold.later_gap_s for one in rounds]
    return row | {"decode_step_ms": 1e3 * statistics.median(later)}
