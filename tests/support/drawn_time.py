"""A clock whose ticks are drawn: engines cut prompts by what steps took, and a failure must come back when drawn again."""

from __future__ import annotations

import time
from contextlib import ExitStack
from unittest import mock

import numpy as np

_TICK_S = 1e-3
"""Mean time between two looks at the clock, of which a step of an engine has about ten."""


def drawn_time(seed: int) -> ExitStack:
    """Replace the clocks of this process until the stack is closed; between two looks at them passes what `seed` draws."""
    rng, now = np.random.default_rng(seed), 1e3

    def look() -> float:
        nonlocal now
        now += float(rng.exponential(_TICK_S))
        return now

    stack = ExitStack()
    for clock in ("perf_counter", "monotonic"):
        stack.enter_context(mock.patch.object(time, clock, look))
    return stack
