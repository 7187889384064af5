"""Limits of healing: idle time of the server before a text, and tokens per minute."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_WINDOW_S = 60.0


class IdleClock:
    """Idle time of a server, as far as it was observed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with a server that was in use a moment ago."""
        self._clock = clock
        self._busy_at = clock()

    def busy(self) -> None:
        """Note that the server is in use now, or may be."""
        self._busy_at = self._clock()

    @property
    def idle_s(self) -> float:
        """Seconds since then."""
        return self._clock() - self._busy_at


class TokenBudget:
    """At most so many tokens per minute; a text that is longer waits until nothing of a minute is spent, and is owed then."""

    def __init__(self, tokens_per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with a full minute; infinity limits nothing."""
        self._limit = tokens_per_minute
        self._clock = clock
        self._left = tokens_per_minute
        self._at = clock()

    def allows(self, num_tokens: int) -> bool:
        """Return whether a text of so many tokens may be computed now."""
        self._fill()
        return self._left >= min(num_tokens, self._limit)

    def spend(self, num_tokens: int) -> None:
        """Note that a text is computed."""
        self._fill()
        self._left -= num_tokens

    def _fill(self) -> None:
        now = self._clock()
        if not math.isinf(self._limit):
            self._left = min(self._limit, self._left + (now - self._at) * self._limit / _WINDOW_S)
        self._at = now
