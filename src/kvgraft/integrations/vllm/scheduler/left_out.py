"""Stored donors for which the catalogue has had no room: remembered until it has."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_INTERVAL_S = 30.0
"""Between two recalls: each reads heads."""
_MOST_KEYS = 1 << 14
"""Keys that are remembered; the oldest are given up, so that a large store does not fill the memory."""


class LeftOut:
    """Keys and lengths, in the order in which they were left out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tokens: dict[str, int] = {}
        self._next_s = clock() + _INTERVAL_S

    def add(self, key: str, num_tokens: int) -> None:
        """Note a donor that a store has and the catalogue has not."""
        self._tokens.pop(key, None)
        self._tokens[key] = num_tokens
        while len(self._tokens) > _MOST_KEYS:
            del self._tokens[next(iter(self._tokens))]

    def discard(self, key: str) -> None:
        """Note that the store has it no more; one that is not known is ignored."""
        self._tokens.pop(key, None)

    def clear(self) -> None:
        """Forget all."""
        self._tokens.clear()

    def take(self, room: int) -> list[str]:
        """Take those that fit into so many tokens, the latest first; none if others were taken a moment ago."""
        if not self._tokens or self._clock() < self._next_s:
            return []
        self._next_s = self._clock() + _INTERVAL_S
        taken = []
        for key, num_tokens in reversed(self._tokens.items()):
            if num_tokens <= room:
                taken.append(key)
                room -= num_tokens
        for key in taken:
            del self._tokens[key]
        return taken
