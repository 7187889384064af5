"""Time first tokens with reuse off and on, in turns, on two clocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvgraft.engine import SamplingParams
from kvgraft.types import ReuseMode

from .settings import CLOCKS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvgraft.engine import LLM
    from kvgraft.types import GraftReport, TokenArray

    Times = dict[str, dict[str, list[float]]]

_TWO = SamplingParams(2, ignore_eos=True)


def first_token_times(llm: LLM, prompt: TokenArray, rounds: int) -> tuple[Times, GraftReport]:
    """Return seconds until the first token of an answer of two, and the report of the last hit or miss.

    A repair after the first token, which an answer of one token would have before it, is not among them.

    Seconds are by mode and clock, in turns that swap their order. Lookup, copy and prefill count; a queue and what is
    published after the first token do not. Nothing is left in the cache, so that every round finds the same.
    """
    found: Times = {mode: {name: [] for name in CLOCKS} for mode in ("off", "graft")}
    modes = [ReuseMode.OFF, ReuseMode.GRAFT]
    report: GraftReport | None = None
    for number in range(rounds):
        for mode in modes[:: -1 if number % 2 else 1]:
            answer = llm.dictate(prompt, [], _TWO, mode)
            for name, times in zip(CLOCKS, (answer.times_s, answer.cpu_times_s), strict=True):
                found[mode.value][name].append(round(times[0], 6))
            report = answer.report if mode is ReuseMode.GRAFT else report
    assert report is not None
    return found, report


def milliseconds(records: Sequence[Mapping[str, Any]], mode: str, clock: str) -> list[float]:
    """Median over the rounds of every record's `times`, which `first_token_times` has found."""
    return [1e3 * float(np.median(record["times"][mode][clock])) for record in records]
