"""How fast the engine computes tokens, from the steps that it made: what a read from a store is weighed against."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_DECAY = 0.8
_LEAST_TOKENS = 32
"""A step of fewer tokens is decoding: its time says nothing about prefill."""


class PrefillSpeed:
    """Tokens per second over decaying sums of prefill steps."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._tokens = self._seconds = 0.0
        self._running: tuple[int, float] | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """None before anything was measured."""
        return self._tokens / self._seconds if self._seconds > 0 else None

    def step_begins(self, num_tokens: int, *, is_prefill_alone: bool) -> None:
        """A step of `num_tokens` is sent out; one that also grafts is not measured."""
        measured = is_prefill_alone and num_tokens >= _LEAST_TOKENS
        self._running = (num_tokens, self._clock()) if measured else None

    def step_ends(self) -> None:
        """Its result is there. With steps sent out in advance it is the latest one that is timed, from when it was sent."""
        if self._running is None:
            return
        num_tokens, started = self._running
        self._running = None
        self._tokens = _DECAY * self._tokens + num_tokens
        self._seconds = _DECAY * self._seconds + self._clock() - started
