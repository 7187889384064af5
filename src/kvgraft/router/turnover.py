"""Room of a worker, estimated from the text that has come lately and the text that has gone."""

from __future__ import annotations

_RECENT_TOKENS = 8_192
"""Tokens of the latest text that are compared."""
_USUAL_WEIGHT = 1 / 16
"""Of the newest size in the usual one."""


class Turnover:
    """Counts text that comes and goes; what was long ago counts less and less. Not thread-safe."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._gained = self._lost = self._usual_size = 0.0

    @property
    def is_full(self) -> bool:
        """Whether text that came lately has displaced other text: more than half as much has gone."""
        return self._lost > self._gained / 2

    def came(self, num_tokens: int, num_new: int, num_units: int = 1) -> None:
        """Count donors or pages that came.

        Args:
            num_tokens: Their text.
            num_new: Tokens of it that were not there yet, under another name.
            num_units: How many they are.
        """
        size = num_tokens / num_units
        weight = _USUAL_WEIGHT if self._usual_size else 1.0
        self._usual_size += weight * (size - self._usual_size)
        self._gained += num_new
        self._let_fade()

    def went(self, num_tokens: float) -> None:
        """Count text that has gone, or is remembered no longer."""
        self._lost += num_tokens
        self._let_fade()

    def went_unknown(self, num_units: int) -> None:
        """Count donors or pages that have gone without being remembered, as usual ones."""
        self.went(num_units * self._usual_size)

    def clear(self) -> None:
        """Begin anew."""
        self._gained = self._lost = self._usual_size = 0.0

    def _let_fade(self) -> None:
        if max(self._gained, self._lost) > _RECENT_TOKENS:
            self._gained, self._lost = self._gained / 2, self._lost / 2
