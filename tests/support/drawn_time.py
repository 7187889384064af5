"""State machines of an engine whose clock is drawn: it cuts prompts by what steps took, and a failure must come back."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import numpy as np
from hypothesis.stateful import RuleBasedStateMachine

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


class DrawnTimeMachine(RuleBasedStateMachine):
    """A machine with an `engine` and a rule `run_dry`, with which every example ends that has not failed."""

    def __init__(self):
        super().__init__()
        self._clock = ExitStack()

    def draw_time(self, seed):
        self._clock = drawn_time(seed)

    def submit(self, request):
        """Hand a request to the engine, arrived now: it took its own moment from the clock that was there at import."""
        self.engine.add(replace(request, arrival=time.perf_counter()))

    def teardown(self):
        with self._clock:
            if hasattr(self, "engine"):
                if sys.exc_info()[0] is None:
                    self.run_dry()
                self.engine.close()
