"""Time that is left for a measurement."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deadline:
    """A time on the clock of `time.monotonic`; infinity never comes."""

    ends_s: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """Return the one in `seconds`."""
        return cls(time.monotonic() + seconds)

    @property
    def left_s(self) -> float:
        """Seconds until then; 0 afterwards."""
        return max(0.0, self.ends_s - time.monotonic())

    @property
    def is_over(self) -> bool:
        """No time is left."""
        return not self.left_s

    def reason_to_skip(self, expected_s: float) -> str:
        """Say why work of so many seconds is not begun, or return an empty text."""
        left_s = self.left_s
        if left_s > expected_s:
            return ""
        return f"no time: {left_s:.0f} s were left" + (f", about {expected_s:.0f} s needed" if expected_s else "")
