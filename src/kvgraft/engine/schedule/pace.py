"""How much prefill a step may carry, so that running streams keep their pace.

While streams run, prefill lives on credit: every step earns `slowdown` times the duration of a step without prefill, and
a step with prefill spends what it took longer. So streams get slower by `slowdown` on average, on any machine and with any
model. Prompts that wait several times longer than this share promises them get more, up to `_MOST_SLOWDOWN`: a saturated
server would otherwise spend its time on small decode batches while its queue grows.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

_REMEMBERED = 5
"""Durations per batch size; their median counts, so that stalls of the machine drop out."""
_REFRESH = 16
"""Steps with prefill after which one without measures the pace of streams again."""
_PATIENCE = 4.0
"""Prompts may take this many times what their share promises before they get more."""
_MOST_SLOWDOWN = 1.0
"""Share that streams lose at most, however late prompts are: they run half as fast, and a saturated server computes prompts
for half of its time. At 2.0 a burst of 24 known prompts is answered no sooner, and the longest gap is a quarter longer."""
_MIN_SECONDS = 5e-3
"""Shorter pieces of prefill cost a quarter more per row; credit is saved up for this much."""
_MAX_DEBT = 6.0
"""Times `_MIN_SECONDS` that a step may overdraw at most: a stall of the machine is not the prompt's fault."""
_STALL = 4.0
"""Times longer than expected that a step without streams counts at most. A process that was held still for seconds (SIGSTOP,
a machine that sleeps) would otherwise divide its next prompts into tiny pieces; a machine that has become slower is believed
step by step."""
_FIRST_FLOPS_TOKENS = 64
"""Tokens of the first prefill, before any speed is known."""


@dataclass(slots=True)
class _Speed:
    """Operations per second, as a ratio of decaying sums."""

    flops: float = 0.0
    seconds: float = 0.0

    def observe(self, flops: float, seconds: float) -> None:
        self.flops = 0.9 * self.flops + flops
        self.seconds = 0.9 * self.seconds + max(seconds, 1e-6)

    @property
    def value(self) -> float | None:
        return self.flops / self.seconds if self.seconds else None


@dataclass(slots=True)
class Pace:
    """Learns the duration of steps and limits the prefill of the next one. Not thread-safe.

    Attributes:
        slowdown: Share that streams may lose, 0.2 for 20 %.
        max_step_s: Longest prefill of a step when no stream runs.
        flops_per_token: Of the model's linear layers.
    """

    slowdown: float
    max_step_s: float
    flops_per_token: float
    _plain: dict[int, deque[float]] = field(default_factory=dict)
    _beside: _Speed = field(default_factory=_Speed)
    _alone: _Speed = field(default_factory=_Speed)
    _credit: float = 0.0
    _since_plain: int = 0

    def prefill_flops(self, num_streams: int, lateness: float) -> float:
        """Operations of prefill that the next step may carry; 0 for none.

        Args:
            num_streams: Requests that get a token from this step.
            lateness: Of the most urgent prompt; see `lateness`.
        """
        if not num_streams:
            return self.prefill_flops_alone
        plain = self.stream_step_s(num_streams)
        if plain is None or self._since_plain >= _REFRESH:
            return 0.0
        late_slowdown = min(self.slowdown * lateness / _PATIENCE, _MOST_SLOWDOWN)
        earned = max(self.slowdown, late_slowdown) * plain
        self._credit = min(self._credit + earned, max(earned, 2 * _MIN_SECONDS))
        if self._credit < min(_MIN_SECONDS, plain):
            return 0.0
        return self._flops(self._beside, self._credit)

    @property
    def prefill_flops_alone(self) -> float:
        """Operations of prefill that a step carries when no stream runs."""
        return self._flops(self._alone, self.max_step_s)

    def flops_beside(self, seconds: float) -> float:
        """Operations of prefill that the machine does in `seconds` while streams run."""
        return self._flops(self._beside, seconds)

    def idle_flops(self, seconds: float) -> float:
        """Operations of prefill that the machine does in `seconds`, or in a step without streams if that is shorter."""
        return self._flops(self._alone, min(seconds, self.max_step_s))

    @property
    def flops_per_s(self) -> float | None:
        """Operations of prefill per second that the machine does if a prompt has it to itself; None while it is not known."""
        return self._alone.value or self._beside.value

    def alone_s(self, flops: float) -> float:
        """Seconds that a prompt of `flops` operations takes if it has the machine to itself; 0 while nothing is known."""
        speed = self.flops_per_s
        return flops / speed if speed else 0.0

    def promised_s(self, flops: float) -> float:
        """Seconds that a prompt of `flops` operations takes beside streams with all that they leave to prompts."""
        speed = self._beside.value or self._alone.value
        return flops / speed * (1.0 + 1.0 / self.slowdown) if speed else 0.0

    def lateness(self, waited_s: float, flops: float) -> float:
        """How many times longer than promised a prompt of `flops` operations has waited."""
        promised = self.promised_s(flops)
        return waited_s / promised if promised else 0.0

    def stream_step_s(self, num_streams: int) -> float | None:
        """Seconds of a step that only decodes `num_streams` requests; None if none was measured lately."""
        known = self._plain.get(num_streams)
        return statistics.median(known) if known else None

    def observe(self, seconds: float, num_streams: int, prefill_flops: float, admission_s: float = 0.0) -> None:
        """Take over how long a step took that carried so many streams and so much prefill.

        Args:
            seconds: Of the whole step.
            num_streams: Requests that got a token from it.
            prefill_flops: Operations of its other rows.
            admission_s: Seconds of it that went into admitting prompts; they cost credit, and say nothing about speed.
        """
        if not num_streams:
            if prefill_flops:
                seconds -= admission_s
                expected = prefill_flops / self._alone.value if self._alone.value else seconds
                self._alone.observe(prefill_flops, min(seconds, _STALL * expected))
                self._credit = 0.0
            return
        if not (prefill_flops or admission_s):
            self._plain.setdefault(num_streams, deque(maxlen=_REMEMBERED)).append(seconds)
            self._since_plain = 0
            return
        self._since_plain += 1
        spent = max(0.0, seconds - (self.stream_step_s(num_streams) or 0.0))
        self._credit = max(self._credit - spent, -_MAX_DEBT * _MIN_SECONDS)
        if prefill_flops:
            self._beside.observe(prefill_flops, spent - admission_s)

    def _flops(self, speed: _Speed, seconds: float) -> float:
        if math.isinf(seconds):
            return math.inf
        known = speed.value or self._alone.value or self._beside.value
        return known * seconds if known else _FIRST_FLOPS_TOKENS * self.flops_per_token
