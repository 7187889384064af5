"""Load and prefill speed of each worker: counted by the router itself, and reported by the worker's metrics."""

from __future__ import annotations

import math
import re
import time
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvgraft.router.worker import WorkerSpec

_REMEMBERED = 15
"""Measured prefills of a worker; their median is its speed."""
_LEAST_TOKENS = 64
"""Shorter prefills say more of the way there and back than of the worker."""
DECODE_COST_TOKENS = 16
"""Cost of a running stream to a prefill at the same worker, in tokens of prefill: a row of each forward pass."""
USUAL_PROMPT_TOKENS = 512
"""Tokens of a waiting request that another router has sent, or that could not be tokenised."""

_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "kvgraft:num_requests_waiting")
_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs", "kvgraft:num_requests_running")
_LABELS = r'\{(?:[^"}\n]|"(?:[^"\\\n]|\\.)*")*\}'  # a value may hold braces: a model's path, say
_SAMPLE = re.compile(rf"^([a-zA-Z_:][\w:]*)(?:{_LABELS})? (\S+)", re.MULTILINE)
_MOST_REQUESTS = 1_000_000
"""A report of more of one kind is nonsense."""


def _now() -> float:
    return time.monotonic()


@dataclass(slots=True, eq=False)
class InFlight:
    """A request at a worker.

    Attributes:
        prefill_tokens: Tokens that it has to compute before its first token; 0 once that is there.
        give_up: Ends the wait for the worker; None where nothing is awaited.
        heard_at: When the worker was heard of last, by `time.monotonic`.
        sent_at: When it was sent, by the same clock.
    """

    prefill_tokens: float
    give_up: Callable[[], None] | None = None
    heard_at: float = field(default_factory=_now)
    sent_at: float = field(default_factory=_now)


@dataclass(slots=True, eq=False)
class WorkerLoad:
    """One worker as the router sees it. Lives on the event loop.

    Attributes:
        spec: The worker.
        is_up: It answers.
        requests: What this router has sent there and is not answered.
        foreign_waiting: Requests of others that wait there, when it was asked last.
        foreign_running: Requests of others that ran there then.
        adapters: Names of models that it serves as adapters of another.
        model: Name of the model itself; empty as long as it has not said it.
        num_sent: Requests sent there so far.
        num_asked: How often it has said that it is well.
        down_since: When it was found to be down, by `time.monotonic`.
    """

    spec: WorkerSpec
    is_up: bool = False
    requests: set[InFlight] = field(default_factory=set)
    foreign_waiting: int = 0
    foreign_running: int = 0
    adapters: frozenset[str] = frozenset()
    model: str = ""
    num_sent: int = 0
    num_asked: int = 0
    down_since: float = 0.0
    _seconds_per_token: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    _last_prefill_at: float = 0.0

    @property
    def num_in_flight(self) -> int:
        """Requests that this router has sent there and that are not answered."""
        return len(self.requests)

    @property
    def seconds_per_token(self) -> float | None:
        """Time that a token of a prefill takes there; None as long as none was measured."""
        return median(self._seconds_per_token) if self._seconds_per_token else None

    @property
    def queued_tokens(self) -> float:
        """Tokens to prefill before a new request: those of requests without a first token, and a bit for streams."""
        waiting = [request for request in self.requests if request.prefill_tokens]
        own = sum(request.prefill_tokens for request in waiting) - self._computed_tokens(waiting)
        streams = len(self.requests) - len(waiting) + self.foreign_running
        return own + self.foreign_waiting * USUAL_PROMPT_TOKENS + streams * DECODE_COST_TOKENS

    def _computed_tokens(self, waiting: list[InFlight]) -> float:
        """Return the tokens that the running prefill has computed, at the usual speed; 0 where that is unknown.

        Never more than half: one that takes longer than usual may take much longer, and a worker that hangs must
        not look idle.
        """
        if not waiting or self.seconds_per_token is None:
            return 0.0
        first = min(waiting, key=lambda request: request.sent_at)
        seconds = _now() - max(first.sent_at, self._last_prefill_at)
        return min(seconds / self.seconds_per_token, first.prefill_tokens / 2)

    def begin(self, prefill_tokens: float) -> InFlight:
        """Count a request that is sent."""
        request = InFlight(max(1.0, prefill_tokens))
        self.requests.add(request)
        self.num_sent += 1
        return request

    def first_token(self, request: InFlight, seconds: float | None) -> None:
        """Note the first token of a request, after `seconds` alone at the worker; None if it was not alone."""
        tokens, request.prefill_tokens = request.prefill_tokens, 0.0
        self._last_prefill_at = _now()
        if seconds is not None and tokens >= _LEAST_TOKENS:
            self._seconds_per_token.append(seconds / tokens)

    def end(self, request: InFlight) -> None:
        """Forget a request that is answered, or given up."""
        self.requests.discard(request)

    def give_up_silent(self, silence_s: float) -> None:
        """End the wait of requests that have heard nothing for so long, if the worker has been down for as long."""
        latest = time.monotonic() - silence_s
        if self.is_up or self.down_since > latest:
            return
        for request in [request for request in self.requests if request.heard_at <= latest]:
            if request.give_up is not None:
                request.give_up()

    def report(self, exposition: str, num_own: int | None = None) -> None:
        """Take over the load that the worker's metrics report; what they do not report is 0.

        Own requests are taken off at once: by the next report they have ended, and would be others' until then.

        Args:
            exposition: The metrics.
            num_own: Most requests of this router that they may count; by default those that are there now.
        """
        own = len(self.requests) if num_own is None else num_own
        samples = _samples(exposition)
        waiting = int(sum(value for name, value in samples if name in _WAITING))
        running = int(sum(value for name, value in samples if name in _RUNNING))
        foreign = max(0, waiting + running - own)
        self.foreign_waiting = min(foreign, waiting)
        self.foreign_running = foreign - self.foreign_waiting


def reported_load(exposition: str) -> int | None:
    """Return the requests that run or wait by a server's metrics; None if these have none."""
    samples = _samples(exposition)
    return int(sum(value for _, value in samples)) if samples else None


def _samples(exposition: str) -> list[tuple[str, float]]:
    """Return names and numbers of requests; what is no number, such as the infinite, is passed over."""
    samples = [(name, _number(value)) for name, value in _SAMPLE.findall(exposition) if name in _WAITING + _RUNNING]
    return [(name, value) for name, value in samples if 0 <= value <= _MOST_REQUESTS]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
